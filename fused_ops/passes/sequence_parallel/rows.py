"""Which rows of a tensor a rank has, and what of a graph is the same on all ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..graph import rewrite
from ..graph.collectives import (
    FLAT,
    Size,
    aten,
    c10d,
    calls,
    group_of,
    is_random,
    known,
    val,
    writes,
)
from ..graph.rewrite import call
from ..graph.split_cat import SLICES, SPLITS
from ..graph.views import CASTS

REDUCTIONS = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.var.correction,
)
_DETERMINED = (
    *REDUCTIONS,
    *SLICES,
    *SPLITS,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.cat.default,
    aten.embedding.default,
    aten.full.default,
    aten.full_like.default,
    aten.scalar_tensor.default,
    aten.arange.start_step,
    torch.ops.prims.iota.default,
)


@dataclass(frozen=True)
class RowLayout:
    """Rows that are counted by dimensions of the sizes ``lead``: each rank has an equal part along ``dim`` of these.

    ``own_chunks``: whether the graph's slice of this rank's part counts as every rank's slice of its own. Another
    rank's graph may slice the same rows, so the ranks must compare their graphs before they run them.
    """

    lead: tuple[Size, ...]
    dim: int
    group: str
    world: int
    rank: int
    own_chunks: bool

    @property
    def own(self) -> list[Size]:
        """The sizes of a rank's part."""
        return [size // self.world if i == self.dim else size for i, size in enumerate(self.lead)]

    def lead_of(self, shape: Sequence[Size]) -> int | None:
        """How many of the first dimensions count all rows; None if it is not known that some do."""
        count = math.prod(self.lead)
        for lead in range(1, len(shape) + 1):
            if known(math.prod(shape[:lead]) == count):
                return lead
        return None

    def own_part(self, node: fx.Node, lead: int, before: fx.Node) -> fx.Node:
        """A rank's part of a tensor that all have."""
        sizes = [*self.lead, *val(node).shape[lead:]]
        sizes[self.dim : self.dim + 1] = [self.world, self.own[self.dim]]
        return call(before, aten.select.int, rewrite.reshape(node, sizes, before), self.dim, self.rank)


def same_on_all_ranks(graph: fx.Graph, group: str) -> set[fx.Node]:
    """What all ranks of a group have alike, if they have the graph's inputs alike.

    Matrix products are not: of which a rank has a part, by its own weights.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            found.add(node)
        elif calls(node, c10d.all_reduce.default, c10d.all_gather_into_tensor.default):
            if group_of(node) == group:
                found.add(node)
        elif node.op == "call_function" and _is_determined(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element is computed of the operands' elements there."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or writes(node) or is_random(node):
        return False
    return torch.Tag.pointwise in target.tags or target in CASTS


def _is_determined(node: fx.Node) -> bool:
    if calls(node, operator.getitem, c10d.wait_tensor.default, *FLAT, *_DETERMINED) or is_pointwise(node):
        return True
    # Of sizes.
    return isinstance(node.meta.get("val"), int | torch.SymInt)
