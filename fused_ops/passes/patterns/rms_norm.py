"""all_reduce, then perhaps a residual, then an RMSNorm: what follows a row-parallel layer.

Known are the spellings of the norm ``s * rsqrt(mean(s ** 2) + eps) * weight`` that multiply by the weight in float32,
as torch's rms_norm does, or round before, as Hugging Face's models do; of the rounded sum, or with vLLM of the sum in
float32; with a number added to the weight, as in Gemma. A graph for training has none of them: its backward pass uses
what stands between.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph import rewrite
from ..graph.collectives import (
    Collective,
    LeftAlone,
    alike,
    argument,
    aten,
    calls,
    communicates,
    first_write,
    group_of,
    is_contiguous,
    is_val,
    known,
    only_user,
    same_shape,
    some,
    val,
    what,
)
from ..graph.rewrite import call
from ..graph.views import CASTS, unchanged


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
class _Norm:
    """``normed`` of a sum: by which weight and numbers."""

    normed: fx.Node
    weight: fx.Node
    offset: float
    eps: float
    nodes: list[fx.Node]
    read: list[fx.Node]


@dataclass
class RmsNorm:
    """What follows a collective: the norm of its result, with a residual or without."""

    sum: _Sum
    norm: _Norm
    dtype: torch.dtype

    @property
    def round_sum(self) -> bool:
        return val(self.sum.node).dtype == self.dtype

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.norm.nodes, *self.norm.read, *self.sum.nodes, *self.sum.read]

    @property
    def form(self) -> str:
        return " → add → rms_norm" if self.sum.residual is not None else " → rms_norm"

    @property
    def detail(self) -> str:
        words = ["residual added"] if self.sum.residual is not None else []
        words.append("rms_norm" if self.round_sum else "rms_norm of the unrounded sum")
        if self.norm.offset:
            words.append(f"{self.norm.offset:g} added to the weight")
        return ", ".join(words)

    @classmethod
    def after(cls, c: Collective) -> RmsNorm | None:
        """What follows a collective; None if no norm does.

        Raises:
            LeftAlone: one does, and is not what the op computes.
        """
        total = _sum_behind(c)
        found = _norm_of(total.node, val(c.wait).dtype)
        if found is None:
            return None
        result = cls(total, found, val(c.wait).dtype)
        result._check(c)
        return result

    def _check(self, c: Collective) -> None:
        total, norm = self.sum, self.norm
        if c.reduce_op != "sum":
            raise LeftAlone(f"the collective reduces by {c.reduce_op!r}")
        if not c.only_waited_for:
            raise LeftAlone("what is pending is used, too")
        others = [u for u in total.node.users if u not in (*norm.nodes, *total.rounded)]
        if not self.round_sum and others:
            raise LeftAlone(f"the unrounded sum is also used by {some(others)}")
        if not all(is_contiguous(val(n)) for n in (total.node, norm.normed)):
            raise LeftAlone("it has strides of its own")
        for read in (total.residual, norm.weight):
            if read is not None and not read < total.at:
                raise LeftAlone(f"{what(read)} is computed behind the sum")
        first = min([c.node, *total.read, *norm.read])
        if (write := first_write(first, norm.normed)) is not None:
            raise LeftAlone(f"{what(write)} writes to memory before it")
        node = c.node.next
        while node is not total.at:
            if communicates(node) and group_of(node) == c.group:
                raise LeftAlone(f"{what(node)} would be overtaken")
            node = node.next

    def replaced_by(self, op: Any, c: Collective) -> dict[fx.Node, fx.Node]:
        """The op in the graph, and what takes the place of which node."""
        at, named = self.sum.at, {}
        if self.norm.offset:
            named["weight_offset"] = self.norm.offset
        if not self.round_sum:
            named["round_sum"] = False
        given = c.x, self.sum.residual, self.norm.weight, self.norm.eps
        both = rewrite.fused(at, op, c, *given, **named)
        normed, sums = (call(at, operator.getitem, both, i) for i in (0, 1))
        new = {self.norm.normed: rewrite.make_contiguous(normed, at)}
        stored = rewrite.make_contiguous(sums, at)
        return new | dict.fromkeys(self.sum.rounded, stored)


def _sum_behind(c: Collective) -> _Sum:
    """What a norm would be of: the reduced tensor, or what it and a residual add up to."""
    reduced, copies = c.wait, []
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
    residual: Any = add.args[1] if add.args[0] is wide else add.args[0]
    read = [wide] if wide is not reduced else []
    if residual is wide or not is_val(residual) or argument(add, 9, "alpha", 1) != 1:
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
    """
    Raises:
        LeftAlone: the sum that is not what the op adds is normed.
    """
    try:
        normed = _norm_of(add, val(alone.node).dtype) is not None
    except LeftAlone:
        normed = True
    if normed:
        raise LeftAlone(why)
    return alone


def _norm_of(x: fx.Node, dtype: torch.dtype) -> _Norm | None:
    """The norm of a node, of the given dtype; None if there is none.

    Raises:
        LeftAlone: it is none that the op computes.
    """
    for user in x.users:
        wide = user if calls(user, *CASTS) and val(user).dtype == torch.float32 else x
        for reader in wide.users:
            if calls(reader, aten.var_mean.correction, aten.native_layer_norm.default):
                raise LeftAlone("it takes the mean away, as no op does")
            if (
                val(wide).dtype == torch.float32
                and _is_square(reader, wide)
                and calls(only_user(reader), aten.mean.dim)
            ):
                return _from_square(x, wide, reader, dtype)
    return None


def _only(node: fx.Node) -> fx.Node:
    """The one user of a node."""
    users = list(node.users)
    if len(users) != 1:
        raise LeftAlone(f"{what(node)} is used by {some(users) if users else 'nothing'}")
    return users[0]


def _expect(right: object, node: fx.Node) -> None:
    if not right:
        raise LeftAlone(f"{what(node)} is another step than an RMSNorm has there")


def _from_square(x: fx.Node, wide: fx.Node, square: fx.Node, dtype: torch.dtype) -> _Norm:
    mean = _only(square)
    dims = argument(mean, 1, "dim")
    of_rows = isinstance(dims, (list, tuple)) and [d % val(x).dim() for d in dims] == [val(x).dim() - 1]
    _expect(of_rows and argument(mean, 2, "keepdim", False) and "dtype" not in mean.kwargs, mean)
    plus = _only(mean)
    # Of two arguments: one more, by name or not, scales the second.
    of_two = calls(plus, aten.add.Tensor, aten.add.Scalar) and not plus.kwargs and len(plus.args) == 2
    _expect(of_two and plus.args[0] is mean and isinstance(plus.args[1], float), plus)
    root = _only(plus)
    _expect(calls(root, aten.rsqrt.default), root)
    scaled = _only(root)
    _expect(calls(scaled, aten.mul.Tensor) and {*scaled.args} == {wide, root}, scaled)
    nodes = [square, mean, plus, root, scaled]
    if wide is not x:
        nodes.append(wide)
        if others := [u for u in wide.users if u not in (square, scaled)]:
            raise LeftAlone(f"{what(wide)} is also used by {some(others)}")
    last = scaled
    if calls(only_user(last), *CASTS) and val(only_user(last)).dtype == dtype:
        last = only_user(last)
        nodes.append(last)
    product = _only(last)
    _expect(calls(product, aten.mul.Tensor), product)
    factor = product.args[1] if product.args[0] is last else product.args[0]
    _expect(is_val(factor), product)
    weight, offset, read = _weight(factor, dtype)  # type: ignore[arg-type]
    is_row = val(weight).dim() == 1 and known(val(weight).shape[0] == val(x).shape[-1])
    if not is_row or val(weight).dtype not in (dtype, torch.float32):
        raise LeftAlone(f"{what(weight)} is no weight of its rows")
    nodes.append(product)
    if val(product).dtype != dtype:
        product = _only(product)
        if not calls(product, *CASTS) or val(product).dtype != dtype:
            raise LeftAlone(f"its result is not {dtype}, as what is reduced")
        nodes.append(product)
    return _Norm(product, weight, offset, plus.args[1], nodes, read)  # type: ignore[arg-type]


def _weight(node: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, float, list[fx.Node]]:
    """The weight that a factor is made of, the number that is added to it, and the nodes that the op makes needless."""
    read: list[fx.Node] = []
    offset = 0.0
    if calls(node, aten.add.Tensor) and len(node.args) == 2 and not node.kwargs and is_val(node.args[0]):
        number = node.args[1]
        if isinstance(number, int | float) and not isinstance(number, bool):
            read.append(node)
            node, offset = node.args[0], float(number)
    source = node.args[0] if calls(node, *CASTS) and val(node).dtype == torch.float32 else None
    if is_val(source) and val(source).dtype == dtype:
        read.append(node)
        node = source
    return node, offset, read


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    if calls(node, aten.pow.Tensor_Scalar):
        return node.args == (x, 2)
    return calls(node, aten.mul.Tensor) and node.args == (x, x)
