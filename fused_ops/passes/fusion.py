"""The pass itself: each collective of a graph is fused, or left alone with a reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ...symm_mem import Group, group_name
from . import forms
from .match import Collective, LeftAlone, collectives, group_of, kind_of
from .report import Entry, Report, source_of

_log = logging.getLogger("weft.passes")
_HERE = Path(__file__).parent
# What decides which nodes are inserted, and what their fake implementations say.
_SOURCES = tuple(
    str(p) for p in (*sorted(_HERE.glob("*.py")), _HERE.parent / "ops.py", _HERE.parent / "checks.py")
)


class FusionError(RuntimeError):
    """A strict pass left a collective alone. ``report`` is that of the graph."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"{report.left} of {len(report.entries)} collectives were not fused\n{report}")
        self.report = report


class FusionPass(CustomGraphPass):
    """Puts weft's fused ops into graphs that torch.compile makes.

        fusion = FusionPass()
        model = torch.compile(model, options=fusion.options)
        model(x)
        print(fusion.report())

    What is not exactly the function that a fused op computes is left alone, and the report says why. Exactly, but for
    rounding: a sum of products may be summed in another order, and in float32 where it was rounded between.

    Inductor keeps compiled graphs in a cache. A graph that it takes from there is as this pass made it (``uuid``
    covers the sources of the pass and its configuration), but the pass does not run then, and **the report stays
    empty**. To see one: ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``.

    Args:
        groups: fuse collectives of these groups only: names, ProcessGroups, 1-D DeviceMeshes or (mesh, dim).
            None for all.
        strict: raise FusionError, out of the compilation, when a collective is left alone.

    Raises:
        TypeError: ``groups`` is one name, not several.
    """

    def __init__(self, groups: Iterable[Group] | None = None, strict: bool = False) -> None:
        if isinstance(groups, str):
            raise TypeError(f"groups: is the string {groups!r}, must be a list of groups")
        self.groups = None if groups is None else frozenset(group_name(g) for g in groups)
        self.strict = strict
        self._entries: list[Entry] = []
        self._graphs = 0

    @property
    def options(self) -> dict[str, Any]:
        """For ``torch.compile(model, options=...)``."""
        return {"post_grad_custom_post_pass": self}

    def report(self) -> Report:
        """What became of every collective of the graphs seen since the pass was made or cleared."""
        return Report(self._entries)

    def clear(self) -> None:
        """Empties the report; graphs are counted from 0 again."""
        self._entries.clear()
        self._graphs = 0

    def uuid(self) -> Any:
        names = "all" if self.groups is None else sorted(self.groups)
        return get_hash_for_files(_SOURCES, f"groups={names} strict={self.strict}")

    def __call__(self, graph: fx.Graph) -> None:
        nodes = list(collectives(graph))
        told = {n: self._told(n) for n in nodes}
        entries: dict[fx.Node, Entry] = {}
        for node in nodes:
            if node not in entries:
                self._fuse(node, told, entries)
        self._graphs += 1
        if not entries:
            return
        graph.lint()
        report = Report(entries[n] for n in nodes)
        self._entries += report.entries
        _log.info("graph %d: %d of %d collectives fused", self._graphs - 1, report.fused, len(nodes))
        if self.strict and report.left:
            raise FusionError(report)

    def _told(self, node: fx.Node) -> dict[str, Any]:
        return {
            "graph": self._graphs,
            "node": node.name,
            "collective": kind_of(node),
            "group": group_of(node),
            "source": source_of(node),
        }

    def _fuse(
        self, node: fx.Node, told: dict[fx.Node, dict[str, Any]], entries: dict[fx.Node, Entry]
    ) -> None:
        """Fuses one collective if it can be, and enters what became of it and of those merged with it."""
        try:
            match = forms.match(Collective.from_node(node, self.groups), self.groups)
            match.replace()
        except LeftAlone as e:
            entries[node] = Entry(**told[node], reason=str(e))
            return
        into: dict[str, Any] = {"dim": match.dim, "fused_into": str(match.op._schema.name)}
        entries[node] = Entry(**told[node], **into, detail=match.detail)
        for other in match.others:
            entries[other] = Entry(**told[other], **into, detail=f"merged with {told[node]['node']}")
