"""What can be computed of a rank's own rows alone, and how: element by element, along a row, or with another shape."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from ..graph import rewrite
from ..graph.collectives import FLAT, aten, calls, is_val, known, same_shape, val
from ..graph.rewrite import call
from .rows import REDUCTIONS, RowLayout, is_pointwise

#: Of each node that is computed by rows, how many of its first dimensions count them.
Leads = Mapping[fx.Node, int]


def lead_of_step(node: fx.Node, leads: Leads, layout: RowLayout, same: Collection[fx.Node]) -> int | None:
    """How many first dimensions count the rows of a node that is made of such; None if it is not computed by rows.

    Args:
        leads: of those that are known.
        same: what all ranks have alike.
    """
    if node.op != "call_function" or not any(n in leads for n in node.all_input_nodes):
        return None
    source = node.args[0] if node.args else None
    if calls(node, operator.getitem):
        return leads.get(source)  # type: ignore[arg-type]
    if calls(node, *FLAT):
        return layout.lead_of(val(node).shape) if is_val(node) else None
    if calls(node, *REDUCTIONS):
        lead = leads[source]  # type: ignore[index]
        dims = _dims(node)
        return lead if dims and all(dim >= lead for dim in dims) and not _casts(node) else None
    if calls(node, aten.expand.default):
        lead = leads[source]  # type: ignore[index]
        have, want = val(source).shape, val(node).shape  # type: ignore[arg-type]
        return lead if len(have) == len(want) and same_shape(have[:lead], want[:lead]) else None
    floating = is_val(node) and val(node).dtype.is_floating_point
    return _lead_of_pointwise(node, leads, same) if floating and is_pointwise(node) else None


def sums_rows(node: fx.Node, leads: Leads) -> bool:
    """Whether the node sums up all rows of a node that is computed by rows, as the gradient of a weight does."""
    if not calls(node, aten.sum.dim_IntList) or node.args[0] not in leads or _casts(node):
        return False
    return sorted(_dims(node)) == list(range(leads[node.args[0]]))  # type: ignore[index]


def step_by_rows(node: fx.Node, own: Mapping[fx.Node, fx.Node], leads: Leads, layout: RowLayout) -> fx.Node:
    """The node of a rank's own rows, before the node itself.

    Args:
        own: what stands for the nodes of which it is made.
        leads: with that of the node.

    Raises:
        LeftAlone: it cannot be called with these.
    """
    if calls(node, operator.getitem):
        return call(node, operator.getitem, own[node.args[0]], node.args[1])  # type: ignore[index]
    lead, count = leads[node], len(layout.lead)
    given: Any = node.args
    if calls(node, *FLAT):
        return rewrite.reshape(own[given[0]], [*layout.own, *val(node).shape[lead:]], node)
    if calls(node, *REDUCTIONS):
        dims = [dim - lead + count for dim in _dims(node)]
        return call(node, node.target, own[given[0]], dims, *given[2:], **node.kwargs)
    if calls(node, aten.expand.default):
        return call(node, aten.expand.default, own[given[0]], [*[-1] * count, *given[1][lead:]])
    rest = val(node).dim() - lead

    def operand(each: fx.Node) -> fx.Node:
        if each in own:
            return own[each]
        if not is_val(each) or val(each).dim() <= rest:
            return each
        if _is_row(each, rest):
            return rewrite.reshape(each, val(each).shape[val(each).dim() - rest :], node)
        return layout.own_part(each, lead, node)

    args, kwargs = fx.map_arg(given, operand), fx.map_arg(node.kwargs, operand)
    return call(node, node.target, *args, **kwargs)


def sum_of_own_rows(node: fx.Node, own: fx.Node, lead: int, layout: RowLayout) -> fx.Node:
    """What the node sums up of these rows, before it."""
    keeps = len(node.args) > 2 and bool(node.args[2])
    total = call(node, aten.sum.dim_IntList, own, list(range(len(layout.lead))), False)
    return rewrite.reshape(total, val(node).shape, node) if keeps else total


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


def _dims(node: fx.Node) -> list[int]:
    source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, list | tuple):
        return []
    return [int(dim) % val(source).dim() for dim in dims]  # type: ignore[arg-type]


def _casts(node: fx.Node) -> bool:
    return node.kwargs.get("dtype") is not None
