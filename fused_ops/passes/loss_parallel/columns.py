"""Tensors that have all ranks' columns in a graph, and what stands for them on a rank's own columns."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import fx

from ....symm_mem import resolve_group
from ..agreement.signature import COMPARED
from ..graph.collectives import Collective
from ..graph.nodes import FLAT, LeftAlone, argument, aten, calls, is_val, only_user, val, walk, what
from ..graph.rewrite import call, repeated, reshape
from ..graph.row_wise import is_pointwise
from ..graph.sizes import Size, known
from ..graph.split_cat import SPLITS, cut_of, is_cut

CAST = torch.ops.prims.convert_element_type.default
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GatheredColumns:
    """``whole`` joins what ``c`` gathers along its last dimension, of which each rank has ``widths``.

    Attributes:
        between: the nodes from the collective's wait to ``whole``, without both.
        rank: this one.
    """

    c: Collective
    whole: fx.Node
    widths: tuple[int, ...]
    between: tuple[fx.Node, ...]
    rank: int

    @property
    def width(self) -> int:
        return self.widths[self.rank]

    @property
    def start(self) -> int:
        return sum(self.widths[: self.rank])

    def shard(self, before: fx.Node) -> fx.Node:
        """Without what fills the last ranks' columns up."""
        if known(val(self.c.x).shape[-1] == self.width):
            return self.c.x
        return call(before, aten.slice.Tensor, self.c.x, -1, 0, self.width)


def gathered_columns(c: Collective) -> GatheredColumns | None:
    """What a gather gathers, if it is joined along the last dimension."""
    rows, cuts = val(c.x).shape[0], (*SPLITS[:2], operator.getitem, aten.slice.Tensor)
    found = walk([c.wait], lambda n: (u for u in n.users if calls(u, *cuts)))
    for cat in dict.fromkeys(u for n in found for u in n.users if calls(u, aten.cat.default)):
        parts: Any = cat.args[0]
        if argument(cat, 1, "dim", 0) % val(cat).dim() != val(cat).dim() - 1 or len(parts) != c.world:
            continue
        widths = tuple(val(part).shape[-1] for part in parts)
        own = all(_is_part(part, c.wait, i, rows) for i, part in enumerate(parts))
        if own and all(isinstance(width, int) for width in widths):
            return _without_filling(
                GatheredColumns(c, cat, widths, tuple(found)[1:], resolve_group(c.group).rank())
            )
    return None


def _without_filling(columns: GatheredColumns) -> GatheredColumns:
    """Of columns from which the last ones are cut off at once, what is left."""
    cut = only_user(columns.whole)
    if cut is None or not is_cut(cut, columns.whole, val(columns.whole).dim() - 1, 0):
        return columns
    count, starts = val(cut).shape[-1], accumulate(columns.widths, initial=0)
    left = tuple(max(min(width, count - at), 0) for width, at in zip(columns.widths, starts, strict=False))
    return replace(columns, whole=cut, widths=left, between=(*columns.between, columns.whole))


def _is_part(node: fx.Node, source: fx.Node, i: int, rows: Size) -> bool:
    """Whether the node is what rank ``i`` has gathered, or the first of its columns."""
    inner = cut_of(node)
    last = val(node).dim() - 1
    if inner is not None and inner.source is not source and is_cut(node, inner.source, last, 0):
        node = inner.source
    return is_cut(node, source, 0, i * rows) and known(val(node).shape[0] == rows)


def has_columns(node: Any) -> TypeGuard[fx.Node]:
    """Whether the node is a tensor with more than a number, or one of each row."""
    return is_val(node) and val(node).dim() > 0 and not known(val(node).shape[-1] == 1)


def keeps_columns(node: fx.Node) -> bool:
    """Whether the node has one input's columns: all that is in another shape, some of its rows, or pointwise."""
    inputs = [a for a in node.args if has_columns(a)]
    if not is_val(node) or len(inputs) != 1 or not val(node).dtype.is_floating_point:
        return False
    before, after = val(inputs[0]), val(node)
    if not after.dim() or not known(before.shape[-1] == after.shape[-1]):
        return False
    if calls(node, aten.slice.Tensor):
        return argument(node, 1, "dim", 0) % after.dim() != after.dim() - 1  # type: ignore[no-any-return]
    return calls(node, *FLAT) or is_pointwise(node)


def uncast(node: fx.Node) -> fx.Node:
    """Without a cast of 16 bits to 32, which is exact."""
    wide = calls(node, CAST) and val(node).dtype == torch.float32
    return node.args[0] if wide and val(node.args[0]).dtype in _HALVES else node  # type: ignore[arg-type,return-value]


class OwnColumns:
    """Nodes of all columns, computed of this rank's own."""

    def __init__(self, columns: GatheredColumns) -> None:
        self.columns = columns
        self._made: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """LeftAlone: it is not computed of gathered ones column by column."""
        if node is self.columns.whole:
            self._made.setdefault(node, self.columns.shard(before))
        if node not in self._made:
            if not keeps_columns(node) and not is_pointwise(node):
                raise LeftAlone(f"its columns meet {what(node)}")
            own = {a: self.of(a, before) for a in node.args if has_columns(a)}
            self._made[node] = self.step(node, own, before)
        return self._made[node]

    def narrow(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The same without an exact cast at the end."""
        if node is not self.columns.whole and calls(node, aten.slice.Tensor, *FLAT):
            source: Any = node.args[0]
            return self.step(node, {source: self.narrow(source, before)}, before)
        return self.of(uncast(node), before)

    def step(self, node: fx.Node, own: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """The node, of its inputs' own columns. What inputs have none are all ranks' alike."""
        if calls(node, *FLAT):
            return reshape(own[node.args[0]], [*val(node).shape[:-1], self.columns.width], before)  # type: ignore[index]
        made = repeated(node, lambda n: own.get(n, n), before)
        made.meta[COMPARED] = {
            self.columns.c.group
        }  # a number of it becomes one of all columns, for all ranks
        return made
