"""LayerNorms.

Known are ``(s - mean(s)) * rsqrt(var(s) + eps) * weight + bias`` as torch decomposes layer_norm, or with the variance
as the mean of squares, as Cohere's models have it; without the weight, the bias or both; a number added to the
weight, as in Nemotron; and layer_norm itself.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from ..graph.collectives import LeftAlone, aten, calls, is_val, known, only_user, some, val, what
from .steps import (
    FoundNorm,
    cast_behind,
    expect,
    is_mean_of_rows,
    is_row,
    is_square,
    next_of,
    of_dtype,
    of_rows,
    scale_of,
    uncast,
    uncast_weight,
)


@dataclass
class _Moments:
    """``centred`` are the rows without their mean, which is their ``variance``'s, too; ``nodes`` lead to these."""

    centred: list[fx.Node]
    variance: fx.Node
    nodes: list[fx.Node]


def layer_norm_of(x: fx.Node, wide: fx.Node, dtype: torch.dtype) -> FoundNorm | None:
    """The LayerNorm of ``x``, of the given dtype, read by way of ``wide``; None if there is none.

    Raises:
        LeftAlone: there is one, and it is none that the op computes.
    """
    for reader in wide.users:
        if calls(reader, aten.native_layer_norm.default) and reader.args[0] is wide:
            return _not_decomposed(x, wide, reader, dtype)
        if val(wide).dtype != torch.float32:
            continue
        moments = None
        if calls(reader, aten.var_mean.correction):
            moments = _of_var_mean(wide, reader)
        elif calls(reader, aten.mean.dim):
            moments = _of_mean(wide, reader)
        if moments is not None:
            return _from_moments(x, wide, moments, dtype)
    return None


def _of_var_mean(wide: fx.Node, both: fx.Node) -> _Moments:
    if not of_rows(both, wide) or both.kwargs.get("correction") != 0:
        raise LeftAlone(f"{what(both)} is not of its rows, or divides by another number than their length")
    parts: dict[object, fx.Node] = {}
    for user in both.users:
        expect(calls(user, operator.getitem) and user.args[1] not in parts, user)
        parts[user.args[1]] = user
    expect({*parts} == {0, 1}, both)
    variance, mean = parts[0], parts[1]
    return _Moments(_centred(wide, mean), variance, [both, variance, mean])


def _of_mean(wide: fx.Node, mean: fx.Node) -> _Moments | None:
    """None where no variance around that mean is taken."""
    around = [u for u in mean.users if calls(u, aten.sub.Tensor) and u.args == (wide, mean)]
    squares = [u for sub in around for u in sub.users if is_square(u, sub)]
    if len(squares) != 1 or not calls(only_user(squares[0]), aten.mean.dim):
        return None
    square, variance = squares[0], next_of(squares[0])
    expect(is_mean_of_rows(mean, wide), mean)
    expect(is_mean_of_rows(variance, square), variance)
    return _Moments(_centred(wide, mean), variance, [mean, square, variance])


def _centred(wide: fx.Node, mean: fx.Node) -> list[fx.Node]:
    for user in mean.users:
        expect(calls(user, aten.sub.Tensor) and user.args == (wide, mean) and not user.kwargs, user)
    return list(mean.users)


def _from_moments(x: fx.Node, wide: fx.Node, moments: _Moments, dtype: torch.dtype) -> FoundNorm:
    eps, (plus, root) = scale_of(moments.variance)
    scaled = next_of(root)
    of_both = [sub for sub in moments.centred if {*scaled.args} == {sub, root}]
    expect(calls(scaled, aten.mul.Tensor) and of_both, scaled)
    nodes = [*moments.nodes, *moments.centred, plus, root, scaled]
    between = [*moments.centred, *([wide] if wide is not x else [])]
    if others := [u for node in between for u in node.users if u not in nodes]:
        raise LeftAlone(f"what is normed is also used by {some(others)}")
    if wide is not x:
        nodes.append(wide)
    last = scaled
    if (cast := cast_behind(last, dtype)) is not None:
        last = cast
        nodes.append(last)
    weight, bias = _Column(None), _Column(None)
    for column, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        user, factor = _of_two(last, op)
        if factor is not None and column.take(factor, x, dtype, offset=column is weight):
            last = user
            nodes.append(last)
    nodes += of_dtype(last, dtype)
    return _found(nodes, weight, bias, eps)


@dataclass
class _Column:
    """A weight or bias, the number that is added to it, and the nodes in front of it that the op makes needless."""

    node: fx.Node | None
    offset: float = 0.0
    read: list[fx.Node] = field(default_factory=list)

    def take(self, given: fx.Node, x: fx.Node, dtype: torch.dtype, *, offset: bool) -> bool:
        """Whether what is given is one of the rows of ``x``, which is entered then."""
        if offset:
            node, number, read = uncast_weight(given, dtype)
        else:
            (node, read), number = uncast(given, dtype), 0.0
        if not is_row(node, x, dtype):
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
    expect(len(results) == 1, norm)
    weight, bias = _Column(None), _Column(None)
    for column, given in zip((weight, bias), columns, strict=True):
        if is_val(given) and not column.take(given, x, dtype, offset=column is weight):
            raise LeftAlone(f"{what(given)} is no weight of its rows")
    nodes = [norm, *parts, *([wide] if wide is not x else []), *of_dtype(results[0], dtype)]
    return _found(nodes, weight, bias, eps)  # type: ignore[arg-type]


def _found(nodes: list[fx.Node], weight: _Column, bias: _Column, eps: float) -> FoundNorm:
    """Of which the last node is the result."""
    if weight.node is not None and bias.node is not None and val(weight.node).dtype != val(bias.node).dtype:
        raise LeftAlone(f"{what(bias.node)} is {val(bias.node).dtype}, its weight {val(weight.node).dtype}")
    read = [*weight.read, *bias.read]
    return FoundNorm(nodes[-1], weight.node, eps, nodes, read, weight.offset, bias.node, layer=True)
