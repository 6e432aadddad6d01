"""What can be computed of a rank's own rows alone, and how: element by element, along a row, or with another shape."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .effects import is_random, writes
from .nodes import FLAT, argument, aten, calls, is_val, val
from .rewrite import call, repeated, reshape
from .sizes import Size, known, same_shape
from .views import CASTS

REDUCTIONS = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.var.correction,
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


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element is made of the operands' elements there, and nothing else is done.

    So it is with a cast, but not to another device; not with what draws random numbers, whose elements depend on how
    many there are, nor with what writes to memory that others may read.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not is_val(node) or writes(node) or is_random(node):
        return False
    if target in CASTS:
        return is_val(node.args[0]) and val(node.args[0]).device == val(node).device
    return torch.Tag.pointwise in target.tags


def reduced_dims(node: fx.Node) -> list[int]:
    """Along which dimensions of its operand a reduction is; none where it names none, and is along all."""
    dims = argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims or []
    return [int(dim) % val(node.args[0]).dim() for dim in dims]  # type: ignore[arg-type]


def reduces_rows(node: Any, target: Any, x: Any) -> bool:
    """Whether the node reduces ``x`` along its last dimension, which stays."""
    if not calls(node, target) or node.args[0] is not x or argument(node, 2, "keepdim") is not True:
        return False
    return reduced_dims(node) == [val(x).dim() - 1]


#: Of each node that is computed by rows, how many of its first dimensions count them.
Leads = Mapping[fx.Node, int]


def lead_of_step(node: fx.Node, leads: Leads, layout: RowLayout, same: Collection[fx.Node]) -> int | None:
    """How many first dimensions count the rows of a node that is made of such; None if it is not computed by rows.
    ``leads``: of those that are known; ``same``: what all ranks have alike."""
    if node.op != "call_function" or not any(n in leads for n in node.all_input_nodes):
        return None
    source = node.args[0] if node.args else None
    if calls(node, operator.getitem):
        return leads.get(source)  # type: ignore[arg-type]
    if calls(node, *FLAT):
        count, shape = math.prod(layout.lead), val(node).shape if is_val(node) else ()
        return next((i for i in range(1, len(shape) + 1) if known(math.prod(shape[:i]) == count)), None)
    if calls(node, *REDUCTIONS):
        lead = leads[source]  # type: ignore[index]
        dims = reduced_dims(node)
        return lead if dims and all(dim >= lead for dim in dims) and not node.kwargs.get("dtype") else None
    if calls(node, aten.expand.default):
        lead = leads[source]  # type: ignore[index]
        have, want = val(source).shape, val(node).shape  # type: ignore[arg-type]
        return lead if len(have) == len(want) and same_shape(have[:lead], want[:lead]) else None
    floating = is_val(node) and val(node).dtype.is_floating_point
    return _lead_of_pointwise(node, leads, same) if floating and is_pointwise(node) else None


def sums_rows(node: fx.Node, leads: Leads) -> bool:
    """Whether the node sums up all rows of a node that is computed by rows, as the gradient of a weight does."""
    if not calls(node, aten.sum.dim_IntList) or node.args[0] not in leads or node.kwargs.get("dtype"):
        return False
    return sorted(reduced_dims(node)) == list(range(leads[node.args[0]]))  # type: ignore[index]


def step_by_rows(node: fx.Node, own: Mapping[fx.Node, fx.Node], leads: Leads, layout: RowLayout) -> fx.Node:
    """The node of a rank's own rows, before the node itself. ``own``: what stands for the nodes of which it is made;
    ``leads``: with that of the node. LeftAlone: it cannot be called with these."""
    lead, layout_dims = leads[node], len(layout.lead)
    given: Any = node.args
    if calls(node, *FLAT):
        return reshape(own[given[0]], [*layout.own, *val(node).shape[lead:]], node)
    if calls(node, *REDUCTIONS):
        dims = [dim - lead + layout_dims for dim in reduced_dims(node)]
        return call(node, node.target, own[given[0]], dims, *given[2:], **node.kwargs)
    if calls(node, aten.expand.default):
        return call(node, aten.expand.default, own[given[0]], [*[-1] * layout_dims, *given[1][lead:]])
    rest = val(node).dim() - lead

    def operand(each: fx.Node) -> fx.Node:
        if each in own or not is_val(each) or val(each).dim() <= rest:
            return own.get(each, each)
        shape = val(each).shape
        if _is_row(each, rest):
            return reshape(each, shape[len(shape) - rest :], node)
        # A rank's part of what all have.
        parts = [*layout.lead, *shape[lead:]]
        parts[layout.dim : layout.dim + 1] = [layout.world, layout.own[layout.dim]]
        return call(node, aten.select.int, reshape(each, parts, node), layout.dim, layout.rank)

    return repeated(node, operand, node)


def sum_of_own_rows(node: fx.Node, own: fx.Node, layout: RowLayout) -> fx.Node:
    """What the node sums up of these rows, before it."""
    keeps = len(node.args) > 2 and bool(node.args[2])
    total = call(node, aten.sum.dim_IntList, own, list(range(len(layout.lead))), False)
    return reshape(total, val(node).shape, node) if keeps else total


def _lead_of_pointwise(node: fx.Node, leads: Leads, same: Collection[fx.Node]) -> int | None:
    shape = val(node).shape
    operands = [n for n in node.all_input_nodes if is_val(n)]
    rests = {val(n).dim() - leads[n] for n in operands if n in leads}
    if len(rests) != 1:
        return None
    (rest,) = rests
    lead = len(shape) - rest
    for each in operands:
        have = val(each).shape
        as_rows = len(have) == len(shape) and same_shape(have[:lead], shape[:lead])
        if each in leads:
            if not as_rows:
                return None
        elif each not in same or not (len(have) <= rest or _is_row(each, rest) or as_rows):
            return None
    return lead


def _is_row(node: fx.Node, rest: int) -> bool:
    """Whether it is the same for all rows: its dimensions but for the last ones are of size 1."""
    shape = val(node).shape
    return all(known(size == 1) for size in shape[: len(shape) - rest])
