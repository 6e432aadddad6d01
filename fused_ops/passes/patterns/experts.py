"""What a mixture's experts add up to: rows of their outputs, weighted and put into the order of the tokens, and the sum
over each token's choices. What reduces it over the ranks puts it together, too.

The index has to be the inverse of an order that the graph has sorted: then no row is out of range, which is an error in
torch and nothing for the op, and none counts from the end. The op multiplies and adds in float32, choices in their
order, then what a shared expert adds, and rounds once; the graph may round between.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ...dispatch.profitability import FusionCandidate, why_combined_before
from ...library import schema
from ..graph.collectives import Collective
from ..graph.effects import check_no_write
from ..graph.nodes import FLAT, LeftAlone, added_to, argument, aten, calls, flattened, is_val, some, val, what
from ..graph.rewrite import call, cast, fused, put_in_place, reshape, undone_if_left
from ..graph.row_wise import reduced_dims
from ..graph.sizes import Size, alike, hint, known, same_shape
from ..graph.views import CASTS, has_same_columns
from .epilogue import stays_after
from .pattern import Pattern


@dataclass
class ExpertsSum:
    """``total`` is the sum over ``choices`` of the rows of ``y`` at ``index``, times ``weights``; ``terms`` are added.

    The index is the inverse of ``order``. The weights are those of the rows, if ``by_rows``, or of the choices.
    ``nodes`` are the steps that the op makes needless.
    """

    total: fx.Node
    y: fx.Node
    index: fx.Node
    order: fx.Node
    weights: fx.Node
    by_rows: bool
    nodes: list[fx.Node]
    terms: list[fx.Node] = field(default_factory=list)

    @property
    def choices(self) -> int:
        return int(val(self.total.args[0]).shape[-2])  # type: ignore[arg-type]

    @property
    def detail(self) -> str:
        shared = ", shared expert added" * bool(self.terms)
        return f"{self.choices} choice{'s' * (self.choices > 1)} of experts combined{shared}"

    @property
    def rows(self) -> tuple[Size, Size]:
        """The shape of an op's sum: tokens and columns."""
        *lead, columns = val(self.total).shape
        return math.prod(lead), columns

    def check(self, x: fx.Node, at: fx.Node, world: int, *, norm: bool = False) -> None:
        """The op may take the place of what reduces ``x``, where ``at`` is, and perhaps of the norm after that.
        LeftAlone: it may not, or the sum by itself should be faster."""
        tokens, columns = self.rows
        if not known(val(x).shape[-1] == columns):
            raise LeftAlone(f"what is reduced has other rows than {what(self.total)}")
        read = [n for n in (self.index, self.weights) if calls(n, aten.index_put.default, aten.index.Tensor)]
        check_no_write(min([*self.nodes, *read]), at)
        sizes, like = (hint(tokens), hint(columns), 0), val(x)
        candidate = FusionCandidate("all_reduce", *sizes, world, like.dtype, like.device.type)
        if (why := why_combined_before(candidate, norm=norm)) is not None:
            raise LeftAlone(why)

    def operands(self, at: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node | None]:
        """y, slots, weights and what is shared, of an op before ``at``. LeftAlone: a size is not there where it is
        needed."""
        tokens, near = self.rows[0], [self.y, self.index]
        slots: fx.Node = self.index
        if calls(slots, aten.index_put.default):
            # Written as the op reads it: a kernel less than a cast of what is written.
            base, places, values = slots.args[:3]
            base, values = (cast(n, torch.int32, at) for n in (base, values))  # type: ignore[arg-type]
            slots = call(at, aten.index_put.default, base, places, values)
        else:
            slots = cast(slots, torch.int32, at)
        weights = self.weights
        if self.by_rows:
            source, index = _taken(weights)
            if index is self.order:
                weights = source  # in the order that the index restores
            else:
                of_rows = reshape(weights, [val(self.y).shape[0]], at, near)
                weights = call(at, aten.index.Tensor, of_rows, [self.index])
        if val(weights).dtype != val(self.y).dtype:
            weights = cast(weights, torch.float32, at)
        slots, weights = (reshape(n, [tokens, self.choices], at, near) for n in (slots, weights))
        shared: fx.Node | None = None
        for term in (reshape(each, self.rows, at, near) for each in self.terms):
            shared = term if shared is None else call(at, aten.add.Tensor, shared, term)
        return self.y, slots, weights, shared


def experts_sum(x: fx.Node) -> ExpertsSum | None:
    """What is reduced, if it is what experts' outputs add up to, perhaps with a term; None if it is something else.
    LeftAlone: it is that, and not as the ops put it together."""
    nodes, node = [], x
    while calls(node, *FLAT, *CASTS) and is_val(node.args[0]):
        nodes.append(node)
        node = node.args[0]
    found = None
    if calls(node, aten.sum.dim_IntList):
        found = _sum_of_choices(node, val(x).dtype)
    elif is_val(node) and val(node).dtype == val(x).dtype:
        for term in filter(is_val, node.all_input_nodes):
            other = added_to(term, node)
            both = is_val(other) and all(alike(val(t), val(node)) for t in (term, other))
            if both and found is None and (found := experts_sum(term)) is not None:
                found.terms.append(other)
                nodes.append(node)
    if found is not None:
        found.nodes += nodes
        for step in found.nodes:
            users = [u for u in step.users if not calls(u, aten.sym_size.int)]
            if len(users) > 1:
                raise LeftAlone(f"{what(step)} is used by {some(users)}")
    return found


def match_experts_reduce_scatter(c: Collective) -> Pattern | None:
    """None where something else is reduced, or the group's own backend runs it beside something. LeftAlone: it is what
    experts add up to, and not as the op puts it together."""
    if c.reduce_op != "sum" or c.beside is not None or (experts := experts_sum(c.x)) is None:
        return None
    experts.check(c.x, c.node, c.world)
    return Pattern.of_tensor(
        c,
        val(c.x),
        op=schema.moe_combine_reduce_scatter,
        form="experts → reduce_scatter",
        detail=", ".join(t for t in (experts.detail, stays_after(c.wait)) if t),
        replace=partial(_replace, c, experts),
        dim=0,
    )


def _replace(c: Collective, experts: ExpertsSum) -> None:
    at = c.node
    with undone_if_left():
        *given, shared = experts.operands(at)
        out = fused(at, schema.moe_combine_reduce_scatter, c, *given, 0, shared=shared)
        out = reshape(out, val(c.wait).shape, at)
    put_in_place({c.wait: out}, [*experts.nodes, c.node, c.wait])


def _sum_of_choices(total: fx.Node, dtype: torch.dtype) -> ExpertsSum | None:
    """None where nothing is taken at an index and weighted."""
    node: Any = total.args[0]
    shape = val(node).shape
    if len(shape) < 3 or reduced_dims(total) != [len(shape) - 2] or argument(total, 2, "keepdim", False):
        return None
    nodes, index, weights, by_rows = [total], None, None, False
    while is_val(node) and node.op == "call_function":
        whole = index is not None and weights is not None
        if calls(node, aten.index.Tensor) and index is None:
            places: Any = node.args[1]
            place = places[0] if len(places) == 1 else None
            if not is_val(place) or val(node.args[0]).dim() != 2:  # type: ignore[arg-type]
                return None
            before, index = node.args[0], flattened(place)
        elif calls(node, aten.mul.Tensor) and weights is None:
            if (pair := _weighted(node)) is None:
                return None
            (before, weights), by_rows = pair, index is not None
        elif whole and val(node).dtype == dtype and val(node).dim() == 2:
            break
        elif calls(node, *CASTS) or (calls(node, *FLAT) and has_same_columns(node)):
            before = node.args[0]
        else:
            break
        nodes.append(node)
        node = before
    if index is None or weights is None:
        return None
    if others := [n for n in nodes if val(n).dtype not in (dtype, torch.float32)]:
        raise LeftAlone(f"{what(others[0])} is {val(others[0]).dtype}, what is reduced {dtype}")
    if val(node).dtype != dtype or val(node).dim() != 2 or not isinstance(shape[-2], int):
        raise LeftAlone(f"{what(node)} is no rows of {dtype} for a known number of choices")
    if not known(val(node).shape[0] == val(index).numel()) or not known(val(node).shape[1] == shape[-1]):
        raise LeftAlone(f"{what(index)} does not take each row of {what(node)} once")
    if (order := _inverse_of(index)) is None:
        raise LeftAlone(f"nothing shows that {what(index)} is the inverse of an order that was sorted")
    return ExpertsSum(total, node, index, order, flattened(weights), by_rows, nodes)


def _weighted(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What is multiplied row by row, and by which column; None if that is something else."""
    a, b = product.args
    if not is_val(a) or not is_val(b):
        return None
    if same_shape(val(a).shape[-1:], [1]):
        a, b = b, a
    shape = val(product).shape
    fits = same_shape(val(a).shape, shape) and same_shape(val(b).shape, (*shape[:-1], 1))
    return (a, b) if fits else None


def _taken(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """What a list was taken from at an index as long as that, and the index; of what is none the node, and None."""
    if calls(node, aten.index.Tensor) and len(node.args[1]) == 1:  # type: ignore[arg-type]
        source, index = node.args[0], node.args[1][0]  # type: ignore[index]
        if is_val(source) and is_val(index) and same_shape(val(source).shape, val(index).shape):
            return source, index
    return node, None


def _inverse_of(index: fx.Node) -> fx.Node | None:
    """The order of which it is the inverse; None if it is not known to be one."""
    if calls(index, aten.index_put.default) and not argument(index, 3, "accumulate", False):
        places: Any = index.args[1]
        values: Any = index.args[2]
        order: Any = places[0] if len(places) == 1 else None
        counts = calls(values, torch.ops.prims.iota.default)
        if counts and (values.kwargs.get("start"), values.kwargs.get("step")) == (0, 1) and _is_order(order):
            size = val(order).shape
            return order if all(same_shape(val(n).shape, size) for n in (index, values)) else None
    elif _is_order(index):
        sorted_: Any = index.args[0]
        return sorted_.args[0] if _is_order(sorted_.args[0]) else None
    return None


def _is_order(node: Any) -> bool:
    """Whether it is in which order a list was sorted: it has each place of that once."""
    sorts = calls(node, operator.getitem) and calls(node.args[0], aten.sort.default, aten.sort.stable)
    return sorts and node.args[1] == 1 and is_val(node) and val(node).dim() == 1
