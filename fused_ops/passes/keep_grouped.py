"""Has Inductor's scheduler keep a collective with its copy-in together, and a wait with its copy-out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass

from .cache_key import pass_key
from .graph.collectives import communicates, waits
from .order.grouped import MARK, only_holds
from .pass_sequence import InTurn, one_of_equals, passes_of
from .settings import PassSettings

#: The option of Inductor for a pass on what its scheduler has, before it fuses.
BEFORE_FUSION = "_pre_fusion_custom_pass"
# Inductor's cache of torch 2.11 knows passes on graphs alone.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


class KeepGrouped(PassSettings, _SchedulerPass):
    """Makes Inductor's grouped nodes of what ``mark_grouped`` has noted."""

    def uuid(self) -> Any:
        return f"{pass_key(self)} grouped"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from .order.keep import GroupOfNodes  # Inductor's part of it

        # Of a graph with more streams the scheduler knows those of the nodes that it had at first, of groups none.
        if not all(map(_on_default_stream, nodes)):
            return nodes
        members: dict[tuple[bool, str], list[Any]] = {}
        for node in nodes:
            if (mark := _mark_of(node)) is not None:
                members.setdefault(mark, []).append(node)
        kept = {node: node for node in nodes}
        for (after, _), each in members.items():
            if len(each) > 1 and _is_closed(each, after):
                kept |= dict.fromkeys(each)
                kept[each[0] if after else each[-1]] = GroupOfNodes.create(each)
        return [node for node in kept.values() if node is not None]


def _mark_of(node: Any) -> tuple[bool, str] | None:
    """What a node of the scheduler belongs to: to a copy-in, if a part of it does; to a copy-out, if all of it does."""
    marks = {origin.meta.get(MARK) for origin in _origins(node)}
    copied_in = [mark for mark in marks if mark is not None and not mark[0]]
    return copied_in[0] if len(copied_in) == 1 else marks.pop() if len(marks) == 1 else None


def _on_default_stream(node: Any) -> bool:
    """Whether it is of no stream that the program names."""
    stream = getattr(getattr(node, "node", None), "get_stream_idx", None)
    return stream is None or stream() is None


def _is_closed(nodes: list[Any], after: bool) -> bool:
    """Whether all but the collective is read in the copy-in alone, or but the wait reads nothing but the copy-out."""
    anchor = waits if after else communicates
    copies = [n for n in nodes if not (n.is_extern() and any(map(anchor, _origins(n))))]
    if after:
        made = {name for node in nodes for name in node.get_buffer_names()}
        return made.issuperset(dep.name for node in copies for dep in node.unmet_dependencies)
    users = [user.node for node in copies for out in node.get_outputs() for user in out.users]
    return all(user in nodes or any(waits(n) or only_holds(n) for n in _origins(user)) for user in users)


def _origins(node: Any) -> Iterable[fx.Node]:
    return getattr(getattr(node, "node", None), "origins", ())


class _InTurnByKey(InTurn, _SchedulerPass):
    """Those that Inductor's cache knows by their keys: with others it keeps no graph."""


def grouped_options(settings: PassSettings, given: Any = None) -> dict[str, Any]:
    """Inductor's option with which its scheduler keeps groups; empty without ``reorder``. ``given``: what the option
    has, which runs before; None for what Inductor's configuration has."""
    if settings.reorder is None:
        return {}
    given = getattr(inductor_config, BEFORE_FUSION) if given is None else given
    others = [each for each in passes_of(given) if not isinstance(each, KeepGrouped)]
    own: Any = KeepGrouped(**settings)
    if others:
        # Of a scheduler's pass without a key Inductor's cache makes no difference to none.
        by_key = all(isinstance(each, _SchedulerPass) and each.uuid() for each in others)
        own = (_InTurnByKey if by_key else InTurn)((*others, own))
    return {BEFORE_FUSION: one_of_equals(own)}
