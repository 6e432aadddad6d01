"""Collectives of what a cat has joined: one for each of its parts, sent from where that lies and read where it comes.

Programs join the shards of a layer's weights to gather them by one call, and cut the result: every byte is copied
before and after. Copy engines send several tensors as fast as one, so large parts are given to them one by one. Then an
operand is the parameter itself, or its cast, and a result has rows that lie together. What is scattered likewise.
Small parts stay joined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config

from ..agreement.signature import Order
from ..graph import rewrite
from ..graph.collectives import Collective, collectives
from ..graph.effects import check_no_write, writes
from ..graph.index_map import plain
from ..graph.nodes import RESHAPES, LeftAlone, argument, aten, c10d, calls, is_val, only_user, val, walk
from ..graph.sizes import is_contiguous
from ..graph.split_cat import SPLITS, cut_of
from ..graph.views import CASTS
from ..order.copy_engines import start_when_needed
from ..order.grouped import is_copy, is_view
from ..origin import copy_origin
from ..settings import AUTO, PassSettings
from .copy_engines import why_not_carried


def take_apart(
    graph: fx.Graph, settings: PassSettings, why_not: Callable[[str], str | None], orders: list[Order]
) -> dict[fx.Node, str]:
    """Has each large part of what is joined gathered or scattered by itself, where ``reorder`` has copy engines do it.

    Args:
        orders: gets the order in which parts are sent, for the vote: ranks may use them in different ones.

    Returns:
        the new collectives, and what is said of them.
    """
    notes: dict[fx.Node, str] = {}
    if settings.reorder is None or settings.collectives != AUTO:
        return notes
    if inductor_config.reorder_for_compute_comm_overlap:
        return notes
    for node in list(collectives(graph)):
        with suppress(LeftAlone):
            c = Collective.from_node(node, settings.groups)
            if why_not(c.group) is None:
                joined = _Joined.of(c)
                starts, places = joined.replace(strict=settings.strict)
                # Digits of a size of 1 would be left out.
                orders.append((plain(sizes := tuple(2 + place for place in places)), sizes))
                notes |= dict.fromkeys(starts, f"one of {len(joined.parts)} that were joined")
    if notes:
        start_when_needed(graph)
    return notes


@dataclass(frozen=True)
class _Joined:
    """A collective of a cat whose result is cut where that has joined.

    Attributes:
        cat: it joins ``parts`` along ``dim``.
        ranks: whether the cat, of a scatter, has a first dimension of ranks, which a view has merged with the next.
        after: what casts the result, or gives what is gathered a first dimension of ranks, one after the other.
        cuts: of each part the nodes that are it in the result.
    """

    c: Collective
    cat: fx.Node
    parts: list[fx.Node]
    dim: int
    ranks: bool
    after: list[fx.Node]
    cuts: list[list[fx.Node]]

    @classmethod
    def of(cls, c: Collective) -> _Joined:
        """LeftAlone: it is none, or has no two parts for copy engines."""
        gathers = c.node.target is c10d.all_gather_into_tensor.default
        if not gathers and c.node.target is not c10d.reduce_scatter_tensor.default:
            raise LeftAlone("neither gathered nor scattered")
        cat = c.x
        if not gathers and calls(cat, *RESHAPES) and only_user(cat) is c.node:
            cat = cat.all_input_nodes[0]
        given = cat.args[0] if calls(cat, aten.cat.default) and len(cat.users) == 1 else ()
        parts: list[fx.Node] = [n for n in given if is_val(n)]  # type: ignore[union-attr]
        if len(parts) < 2 or len(parts) != len(given):  # type: ignore[arg-type]
            raise LeftAlone("no cat of tensors that nothing else uses")
        if not all(isinstance(size, int) for n in parts for size in val(n).shape):
            raise LeftAlone("its sizes are not known before the run")
        whole = val(cat)
        dim = argument(cat, 1, "dim", 0) % whole.dim()
        sizes = [val(n).shape[dim] for n in parts]
        ranks = cat is not c.x
        if ranks and (not dim or whole.shape[0] != c.world or [*val(c.x).shape] != _merged(whole.shape)):
            raise LeftAlone("what is scattered is no view by ranks")
        if any(val(n).dtype != whole.dtype or val(n).dim() != whole.dim() for n in parts):
            raise LeftAlone("the cat casts its parts")
        check_no_write(cat, c.wait)
        after, cut, node = [], dim - ranks, c.wait
        by_rank = [c.world, *whole.shape]
        while calls(user := only_user(node), *CASTS, *(RESHAPES if gathers else ())):
            node = user
            after.append(user)
            if calls(user, *RESHAPES):
                if [*val(user).shape] != by_rank or cut != dim:
                    raise LeftAlone("its result has another shape")
                cut = dim + 1
        if gathers and not cut:
            raise LeftAlone("it is cut by ranks")
        if not gathers and not (ranks or dim):
            raise LeftAlone("it is joined by ranks")
        return cls(c, cat, parts, dim, ranks, after, _cuts(node, cut, sizes))

    def replace(self, *, strict: bool) -> tuple[list[fx.Node], list[int]]:
        """Puts a collective for each large part, and one for all others, in its place; gives these, and the parts'
        places in the cat in the order in which they are sent.

        LeftAlone: fewer than two are large enough for copy engines, a result is read by its strides, or others would be
        left to the backend, which a ``strict`` pass does not allow.
        """
        c = self.c
        large = [i for i, part in enumerate(self.parts) if why_not_carried(c, val(part)) is None]
        if len(large) < 2:
            raise LeftAlone("copy engines would not carry its parts")
        if any(calls(n, aten.as_strided.default) for cut in self.cuts for n in _readers(cut)):
            raise LeftAlone("a part of its result is read by strides")
        small = [i for i in range(len(self.parts)) if i not in large]
        if small and strict:
            raise LeftAlone("copy engines would not carry all of its parts")
        # Collectives keep their order: what is used first is to be first.
        used = [
            min((n for n in _readers(cut, is_copy) if not is_copy(n)), default=c.wait) for cut in self.cuts
        ]
        groups = [[i] for i in large] + [small] * bool(small)
        groups.sort(key=lambda which: min(used[i] for i in which))
        results: dict[int, fx.Node] = {}
        with rewrite.undone_if_left():
            starts = [self._collective(which, results) for which in groups]
        for start in starts:
            copy_origin(c.node, start)
        for i, cut in enumerate(self.cuts):
            for old in cut:
                old.replace_all_uses_with(results[i])
            _without_copy(results[i])
            # Views of it have other strides now, in other memory.
            for view in [*walk([results[i]], lambda n: filter(is_view, n.users))][1:]:
                view.meta["val"] = rewrite.value(view.target, view.args, view.kwargs)
        gone = [n for cut in self.cuts for n in cut]
        gone += [n.args[0] for n in gone if calls(n, operator.getitem)]  # type: ignore[misc]
        rewrite.erase_unused([*gone, *self.after, c.wait, c.node, c.x, self.cat])
        return starts, [i for which in groups for i in which]

    def _collective(self, which: list[int], results: dict[int, fx.Node]) -> fx.Node:
        """The start of that of some parts, whose results it enters."""
        c, parts = self.c, [self.parts[i] for i in which]
        x = parts[0] if len(parts) == 1 else rewrite.call(c.node, aten.cat.default, parts, self.dim)
        shape, cut = val(x).shape, self.dim - self.ranks
        x = rewrite.reshape(x, _merged(shape), c.node) if self.ranks else x
        start = rewrite.call(c.node, c.node.target, rewrite.make_contiguous(x, c.node), *c.node.args[1:])
        whole = rewrite.call(c.wait, c10d.wait_tensor.default, start)
        for step in self.after:
            if calls(step, *RESHAPES):
                whole, cut = rewrite.reshape(whole, [c.world, *shape], c.wait), self.dim + 1
            else:
                whole = rewrite.call(c.wait, step.target, whole, *step.args[1:], **step.kwargs)
        bounds = accumulate((val(n).shape[self.dim] for n in parts), initial=0)
        for i, ends in zip(which, pairwise(bounds), strict=True):
            alone = len(which) == 1
            results[i] = whole if alone else rewrite.call(c.wait, aten.slice.Tensor, whole, cut, *ends)
        return start


def _merged(shape: Iterable[Any]) -> list[Any]:
    """That of a view in which the first two dimensions are one."""
    ranks, first, *rest = shape
    return [ranks * first, *rest]


def _cuts(node: fx.Node, dim: int, sizes: list[int]) -> list[list[fx.Node]]:
    """Of each part along a dimension the nodes that are it. LeftAlone: a part is used by none, or something else uses
    the whole."""
    found: list[list[fx.Node]] = [[] for _ in sizes]
    at = {begin: i for i, begin in enumerate(accumulate(sizes[:-1], initial=0))}
    for piece in (n for user in node.users for n in (user.users if calls(user, *SPLITS) else [user])):
        cut = cut_of(piece)
        if cut is None or cut.dropped:
            raise LeftAlone("something uses all of its result")
        if cut.dim != dim:
            raise LeftAlone("it is cut along another dimension")
        i = at.get(cut.start) if isinstance(cut.start, int) else None
        if i is None or cut.stop - cut.start != sizes[i]:
            raise LeftAlone("it is cut elsewhere than it was joined")
        found[i].append(piece)
    if not all(found):
        raise LeftAlone("a part of its result is not used")
    return found


def _readers(nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = is_view) -> set[fx.Node]:
    """All that reads these or views of them, or what else it is to look through."""
    return {user for node in walk(nodes, lambda n: filter(through, n.users)) for user in node.users}


def _without_copy(result: fx.Node) -> None:
    """Drops the copy that made a part of the whole contiguous, unless something writes to that."""
    copy = only_user(result)
    if not calls(copy, aten.clone.default) or not is_contiguous(val(result)):
        return
    if not is_contiguous(val(copy)) or any(map(writes, _readers([copy]))):
        return
    copy.replace_all_uses_with(result)
    result.graph.erase_node(copy)
