"""RMSNorms and LayerNorms, in the steps that they are written in.

Known are the spellings of ``s * rsqrt(mean(s ** 2) + eps) * weight`` that multiply by the weight in float32, as torch's
rms_norm does, or round before, as Hugging Face's models do; with a number added to the weight, as in Gemma. And
``(s - mean(s)) * rsqrt(var(s) + eps) * weight + bias`` as torch decomposes layer_norm, or with the variance as the mean
of squares, as Cohere's models have it; without the weight, the bias or both; a number added to the weight, as in
Nemotron; and layer_norm itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..graph.nodes import LeftAlone, aten, calls, is_val, only_user, some, used_by, val, what
from ..graph.row_wise import reduces_rows
from ..graph.sizes import known
from ..graph.views import CASTS


@dataclass
class FoundNorm:
    """``normed`` of a sum, by which weight, bias and numbers; ``layer``: of a LayerNorm, else of an RMSNorm.

    ``nodes`` are its steps, ``read`` those before its weight and bias that the op makes needless.
    """

    normed: fx.Node
    weight: fx.Node | None
    eps: float
    nodes: list[fx.Node]
    read: list[fx.Node]
    offset: float = 0.0
    bias: fx.Node | None = None
    layer: bool = False

    @property
    def word(self) -> str:
        return "layer_norm" if self.layer else "rms_norm"


@dataclass
class _Moments:
    """``centred`` are the rows that are scaled by the root of their ``variance``; ``nodes`` lead to these.

    For a LayerNorm they are without their mean, which is the variance's, too; else the variance is around 0.
    """

    centred: list[fx.Node]
    variance: fx.Node
    nodes: list[fx.Node]
    layer: bool = True


def norm_of(x: fx.Node, dtype: torch.dtype) -> FoundNorm | None:
    """The norm of a node, of the given dtype; None if there is none. LeftAlone: it is none that an op computes."""
    for user in x.users:
        wide = user if calls(user, *CASTS) and val(user).dtype == torch.float32 else x
        for reader in wide.users:
            if calls(reader, aten.native_layer_norm.default) and reader.args[0] is wide:
                return _not_decomposed(x, wide, reader, dtype)
        for moments_of in (_of_var_mean, _of_mean, _of_square) if val(wide).dtype == torch.float32 else ():
            for reader in wide.users:
                if (moments := moments_of(wide, reader)) is not None:
                    return _from_moments(x, wide, moments, dtype)
    return None


def _of_var_mean(wide: fx.Node, both: fx.Node) -> _Moments | None:
    if not calls(both, aten.var_mean.correction):
        return None
    if not reduces_rows(both, aten.var_mean.correction, wide) or both.kwargs.get("correction") != 0:
        raise LeftAlone(f"{what(both)} is not of its rows, or divides by another number than their length")
    parts: dict[object, fx.Node] = {}
    for user in both.users:
        _expect(calls(user, operator.getitem) and user.args[1] not in parts, user)
        parts[user.args[1]] = user
    _expect({*parts} == {0, 1}, both)
    variance, mean = parts[0], parts[1]
    return _Moments(_centred(wide, mean), variance, [both, variance, mean])


def _of_mean(wide: fx.Node, mean: fx.Node) -> _Moments | None:
    """None where no variance around that mean is taken."""
    if not calls(mean, aten.mean.dim):
        return None
    around = [u for u in mean.users if calls(u, aten.sub.Tensor) and u.args == (wide, mean)]
    squares = [u for sub in around for u in sub.users if _is_square(u, sub)]
    if len(squares) != 1 or not calls(only_user(squares[0]), aten.mean.dim):
        return None
    square, variance = squares[0], _next_of(squares[0])
    _expect(_is_mean_of_rows(mean, wide), mean)
    _expect(_is_mean_of_rows(variance, square), variance)
    return _Moments(_centred(wide, mean), variance, [mean, square, variance])


def _of_square(wide: fx.Node, square: fx.Node) -> _Moments | None:
    mean = used_by(square, aten.mean.dim)
    if not _is_square(square, wide) or mean is None:
        return None
    _expect(_is_mean_of_rows(mean, square), mean)
    return _Moments([wide], mean, [square, mean], layer=False)


def _centred(wide: fx.Node, mean: fx.Node) -> list[fx.Node]:
    for user in mean.users:
        _expect(calls(user, aten.sub.Tensor) and user.args == (wide, mean) and not user.kwargs, user)
    return list(mean.users)


def _from_moments(x: fx.Node, wide: fx.Node, moments: _Moments, dtype: torch.dtype) -> FoundNorm:
    eps, scaling = _scale_of(moments.variance, moments.centred)
    between = [node for node in dict.fromkeys([*moments.centred, wide]) if node is not x]
    nodes = [*moments.nodes, *between, *scaling]
    if others := [u for node in between for u in node.users if u not in nodes]:
        raise LeftAlone(f"what is normed is also used by {some(others)}")
    cast = used_by(scaling[-1], *CASTS)
    last = cast if cast is not None and val(cast).dtype == dtype else scaling[-1]
    nodes.append(last)
    weight, bias = _Column(None), _Column(None)
    for column, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor))[: 1 + moments.layer]:
        user, factor = _of_two(last, op)
        if factor is not None and column.take(factor, x, dtype, offset=column is weight):
            last = user
            nodes.append(last)
    if not moments.layer and weight.node is None:
        product = _next_of(last)
        _expect(calls(product, aten.mul.Tensor), product)
        raise LeftAlone(f"{what(product)} multiplies by what is no weight of its rows")
    nodes += _of_dtype(last, dtype)
    return _found(nodes, weight, bias, eps, moments.layer)


@dataclass
class _Column:
    """A weight or bias, the number that is added to it, and the nodes before it that the op makes needless."""

    node: fx.Node | None
    offset: float = 0.0
    read: list[fx.Node] = field(default_factory=list)

    def take(self, given: fx.Node, x: fx.Node, dtype: torch.dtype, *, offset: bool) -> bool:
        """Whether what is given is one of the rows of ``x``, which is entered then."""
        node, number, read = given, 0.0, list[fx.Node]()
        if offset and calls(node, aten.add.Tensor) and len(node.args) == 2 and not node.kwargs:
            source, added = node.args
            if is_val(source) and isinstance(added, int | float) and not isinstance(added, bool):
                read.append(node)
                node, number = source, float(added)
        source = node.args[0] if calls(node, *CASTS) and val(node).dtype == torch.float32 else None
        if is_val(source) and val(source).dtype == dtype:
            read.append(node)
            node = source
        if not _is_row(node, x, dtype):
            return False
        self.node, self.offset, self.read = node, number, read
        return True


def _of_two(node: fx.Node, op: object) -> tuple[fx.Node, fx.Node | None]:
    """The one user of a node, if it applies ``op`` to it and another one, and that one."""
    user = only_user(node)
    if not calls(user, op) or user.kwargs or len(user.args) != 2:
        return node, None
    other = user.args[1] if user.args[0] is node else user.args[0]
    return user, other if other is not node and is_val(other) else None


def _not_decomposed(x: fx.Node, wide: fx.Node, norm: fx.Node, dtype: torch.dtype) -> FoundNorm:
    _, shape, *columns, eps = norm.args
    if len(shape) != 1 or not known(shape[0] == val(x).shape[-1]):  # type: ignore[arg-type, index]
        raise LeftAlone(f"{what(norm)} is not of its rows")
    parts = [u for u in norm.users if calls(u, operator.getitem)]
    if others := [u for part in parts if part.args[1] != 0 for u in part.users]:
        raise LeftAlone(f"its mean or its root is also used by {some(others)}")
    results = [part for part in parts if part.args[1] == 0]
    _expect(len(results) == 1, norm)
    weight, bias = _Column(None), _Column(None)
    for column, given in zip((weight, bias), columns, strict=True):
        if is_val(given) and not column.take(given, x, dtype, offset=column is weight):
            raise LeftAlone(f"{what(given)} is no weight of its rows")
    nodes = [norm, *parts, *([wide] if wide is not x else []), *_of_dtype(results[0], dtype)]
    return _found(nodes, weight, bias, eps)  # type: ignore[arg-type]


def _found(nodes: list[fx.Node], weight: _Column, bias: _Column, eps: float, layer: bool = True) -> FoundNorm:
    """Of which the last node is the result."""
    if weight.node is not None and bias.node is not None and val(weight.node).dtype != val(bias.node).dtype:
        raise LeftAlone(f"{what(bias.node)} is {val(bias.node).dtype}, its weight {val(weight.node).dtype}")
    read = [*weight.read, *bias.read]
    return FoundNorm(nodes[-1], weight.node, eps, nodes, read, weight.offset, bias.node, layer)


def _next_of(node: fx.Node) -> fx.Node:
    if (user := only_user(node)) is None:
        raise LeftAlone(f"{what(node)} is used by {some(node.users) if node.users else 'nothing'}")
    return user  # type: ignore[no-any-return]


def _expect(right: object, node: fx.Node) -> None:
    if not right:
        raise LeftAlone(f"{what(node)} is another step than a norm has there")


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    if calls(node, aten.pow.Tensor_Scalar):
        return node.args == (x, 2)
    return calls(node, aten.mul.Tensor) and node.args == (x, x)


def _is_mean_of_rows(node: fx.Node, x: fx.Node) -> bool:
    return reduces_rows(node, aten.mean.dim, x) and "dtype" not in node.kwargs


def _scale_of(variance: fx.Node, centred: Sequence[fx.Node]) -> tuple[float, list[fx.Node]]:
    """eps, and the nodes from the variance to what one of the centred rows, multiplied by the root, is."""
    plus = _next_of(variance)
    # Of two arguments: one more, by name or not, scales the second.
    of_two = calls(plus, aten.add.Tensor, aten.add.Scalar) and not plus.kwargs and len(plus.args) == 2
    _expect(of_two and plus.args[0] is variance and isinstance(plus.args[1], float), plus)
    root = _next_of(plus)
    _expect(calls(root, aten.rsqrt.default), root)
    scaled = _next_of(root)
    of_both = calls(scaled, aten.mul.Tensor) and any({*scaled.args} == {x, root} for x in centred)
    _expect(of_both, scaled)
    return plus.args[1], [plus, root, scaled]  # type: ignore[return-value]


def _is_row(node: fx.Node, x: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node may be a weight or bias of the rows of ``x``."""
    row = val(node).dim() == 1 and known(val(node).shape[0] == val(x).shape[-1])
    return row and val(node).dtype in (dtype, torch.float32)


def _of_dtype(node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    """The node in that dtype: itself, or the one cast that uses it, after it."""
    if val(node).dtype == dtype:
        return [node]
    cast = _next_of(node)
    if not calls(cast, *CASTS) or val(cast).dtype != dtype:
        raise LeftAlone(f"its result is not {dtype}, as what is reduced")
    return [node, cast]
