"""What follows a row-parallel layer's all-reduce: perhaps a residual, then a norm.

The norm is of the rounded sum, or with vLLM of the sum in float32. In a graph for training one stays whose backward
uses what stands between, such as the root.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...library import schema
from ..graph.collectives import Collective, communicates, group_of
from ..graph.effects import first_write
from ..graph.nodes import LeftAlone, added_to, aten, between, calls, is_val, only_user, some, val, what
from ..graph.rewrite import call, fused, hoist, make_contiguous, reshape
from ..graph.sizes import Size, alike, is_contiguous, same_shape
from ..graph.views import CASTS, unchanged
from .norm import FoundNorm, norm_of
from .quant import FollowingQuant


@dataclass
class _Sum:
    """``node``, to which ``residual`` is added, is normed; ``rounded`` are what it is in the dtype of the reduced."""

    node: fx.Node
    at: fx.Node
    residual: fx.Node | None
    rounded: list[fx.Node]
    nodes: list[fx.Node]
    read: list[fx.Node]  # casts of what the op reads itself


@dataclass
class FollowingNorm:
    """What follows a collective: the norm of its result, with a residual or without."""

    sum: _Sum
    norm: FoundNorm
    dtype: torch.dtype
    quant: FollowingQuant | None = None
    stays: str = ""  # what becomes of a step after it that is not fused

    @property
    def round_sum(self) -> bool:
        return val(self.sum.node).dtype == self.dtype

    @property
    def nodes(self) -> list[fx.Node]:
        of_quant = [] if self.quant is None else self.quant.nodes
        return [*self.norm.nodes, *self.norm.read, *self.sum.nodes, *self.sum.read, *of_quant]

    @property
    def form(self) -> str:
        quant = "" if self.quant is None else " → quant"
        return f"{' → add' if self.sum.residual is not None else ''} → {self.norm.word}{quant}"

    @property
    def op(self) -> Any:
        if self.quant is not None:
            return schema.all_reduce_rms_norm_quant
        return schema.all_reduce_layer_norm if self.norm.layer else schema.all_reduce_rms_norm

    @property
    def detail(self) -> str:
        words = ["residual added"] if self.sum.residual is not None else []
        words.append(self.norm.word + ("" if self.round_sum else " of the unrounded sum"))
        if self.norm.offset:
            words.append(f"{self.norm.offset:g} added to the weight")
        words += [t for t in (self.quant.detail if self.quant is not None else "", self.stays) if t]
        return ", ".join(words)

    @classmethod
    def after(cls, c: Collective) -> FollowingNorm | None:
        """What follows a collective; None if no norm does. LeftAlone: one does, and is not what the op computes."""
        dtype = val(c.wait).dtype
        total = _sum_after(c.wait)
        found = norm_of(total.node, dtype)
        if found is None:
            return None
        follows = cls(total, found, dtype)
        follows._check(c)
        try:
            follows.quant = FollowingQuant.after(found, total.at)
        except LeftAlone as e:
            follows.stays = f"what makes fp8 of it stays: {e}"
        return follows

    def _check(self, c: Collective) -> None:
        total, norm = self.sum, self.norm
        if c.reduce_op != "sum":
            raise LeftAlone(f"the collective reduces by {c.reduce_op!r}")
        if norm.layer and not self.round_sum:
            raise LeftAlone("it is of the unrounded sum, which no op takes a LayerNorm of")
        others = [u for u in total.node.users if u not in (*norm.nodes, *total.rounded)]
        if not self.round_sum and others:
            raise LeftAlone(f"the unrounded sum is also used by {some(others)}")
        if not all(is_contiguous(val(n)) for n in (total.node, norm.normed)):
            raise LeftAlone("it has strides of its own")
        for read in (total.residual, norm.weight, norm.bias):
            if read is not None and not read < total.at:
                raise LeftAlone(f"{what(read)} is computed after the sum")
        first = min([c.node, *total.read, *norm.read])
        if (write := first_write(first, norm.normed)) is not None:
            raise LeftAlone(f"{what(write)} writes to memory before it")
        for node in between(c.node, total.at):
            if communicates(node) and group_of(node) == c.group:
                raise LeftAlone(f"{what(node)} would be overtaken")

    def replaced(
        self, c: Collective, op: Any, given: Sequence[fx.Node], rows: Sequence[Size] = (), **named: Any
    ) -> dict[fx.Node, fx.Node]:
        """What takes the place of which node: results of the op, in place of a collective. ``given``: the op's first
        arguments; ``rows``: the shape of the residual and the results, where it is not that in the graph."""
        at, residual, shape = self.sum.at, self.sum.residual, val(self.sum.node).shape
        if residual is not None:
            residual = reshape(residual, rows or shape, at)
        if self.norm.offset:
            named["weight_offset"] = self.norm.offset
        if not self.round_sum:
            named["round_sum"] = False
        columns = (self.norm.weight, self.norm.bias) if self.norm.layer else (self.norm.weight,)
        if self.quant is not None:
            hoist(self.quant.late, at)
            named |= self.quant.arguments
        made = fused(at, op, c, *given, residual, *columns, self.norm.eps, **named)

        def whole(i: int) -> fx.Node:
            out = reshape(call(at, operator.getitem, made, i), shape, at)
            return make_contiguous(out, at)

        if self.quant is None:
            new = {self.norm.normed: whole(0)}
        else:
            count = 1 if self.quant.given else 2
            new = self.quant.replaced([call(at, operator.getitem, made, i) for i in range(count)], at)
        stored = whole(1 if self.quant is None else 2)
        for i, node in enumerate(self.sum.rounded):
            # What is other memory in the graph stays other memory.
            new[node] = stored if i == 0 else call(at, aten.clone.default, stored)
        return new


def _sum_after(reduced: fx.Node) -> _Sum:
    """What a norm would be of: the reduced tensor, or what it and a residual add up to."""
    copies = []
    while is_val(copy := only_user(reduced)) and unchanged(copy) is not None:
        copies.append(copy)
        reduced = copy
    dtype = val(reduced).dtype
    alone = _Sum(reduced, reduced, None, [reduced], copies, [])
    wide, add = reduced, only_user(reduced)
    if calls(add, *CASTS) and val(add).dtype == torch.float32 != dtype:
        wide, add = add, only_user(add)
    if not calls(add, aten.add.Tensor) or not is_val(add):
        return alone
    residual = added_to(wide, add)
    read = [wide] if wide is not reduced else []
    if not is_val(residual):
        return _unless_normed(alone, add, f"{what(add)} adds something else than a residual")
    if val(add).dtype == torch.float32 != dtype and val(residual).dtype == torch.float32:
        if not calls(residual, *CASTS):
            return _unless_normed(alone, add, f"{what(residual)} is float32, what is reduced {dtype}")
        read.append(residual)
        residual = residual.args[0]
    fits = is_val(residual) and alike(val(residual), val(reduced))
    if not fits or not same_shape(val(add).shape, val(reduced).shape):
        return _unless_normed(alone, add, f"{what(add)} adds what is not like what is reduced")
    if val(add).dtype == dtype:
        return _Sum(add, add, residual, [add], [add, *copies], read)
    rounded = [u for u in add.users if calls(u, *CASTS) and val(u).dtype == dtype]
    # Rounded at once, a sum in float32 is the sum.
    node = rounded[0] if len(rounded) == len(add.users) == 1 else add
    return _Sum(node, add, residual, rounded, [add, *copies, *rounded], read)


def _unless_normed(alone: _Sum, add: fx.Node, why: str) -> _Sum:
    """LeftAlone: the sum that is not what the op adds is normed."""
    try:
        normed = norm_of(add, val(alone.node).dtype) is not None
    except LeftAlone:
        normed = True
    if normed:
        raise LeftAlone(why)
    return alone
