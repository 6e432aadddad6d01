"""A logsumexp of gathered columns, as a z-loss takes it beside the cross entropy, and the gradient that a joint graph
makes of it, as torch decomposes both.

    top = where(abs(amax(x)) == inf, 0, amax(x)); result = log(sum(exp(x - top))) + top
    of_x = by * exp(x - result)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.collectives import communicates
from ..graph.effects import writes
from ..graph.nodes import FLAT, LeftAlone, aten, calls, used_by, val, walk, what
from ..graph.rewrite import call, cast, put_in_place, reshape, undone_if_left
from ..graph.row_wise import reduced_dims, reduces_rows
from ..graph.sizes import same_shape
from ..origin import put_for
from .columns import OwnColumns, uncast
from .gradient import Path
from .replace import ColumnLoss, follow, made_of, of_all_ranks
from .softmax import number_of


@dataclass(frozen=True)
class LogSum:
    """
    Attributes:
        x: [..., V], float32.
        result: [...] or [..., 1].
        gradients: of x, each with ``by``, [..., 1].
    """

    x: fx.Node
    result: fx.Node
    gradients: tuple[tuple[fx.Node, fx.Node], ...]


def elements_of(node: fx.Node) -> fx.Node:
    """What the node has the elements of, but for exact casts."""
    while (before := node.args[0] if calls(node, *FLAT) else uncast(node)) is not node:
        node = before  # type: ignore[assignment]
    return node


def log_sum_of(x: fx.Node) -> LogSum | None:
    """LeftAlone: the backward uses it otherwise."""
    maxima = [u for u in x.users if reduces_rows(u, aten.amax.default, x)]
    found = (_result(x, top) for amax in maxima for top in amax.users if _is_finite(top, amax))
    result: Any = next(filter(None, found), None)
    if result is None:
        return None
    results = [result, *(u for u in result.users if calls(u, *FLAT))]
    shifted = [u for r in results for u in r.users if calls(u, aten.sub.Tensor) and u.args == (x, r)]
    return LogSum(x, result, tuple(_gradient(u) for u in shifted))


def _is_finite(top: Any, amax: fx.Node) -> bool:
    """Whether it is the maximum, or 0 in place of an infinite one."""
    if not calls(top, aten.where.self) or number_of(top.args[1]) != 0 or top.args[2] is not amax:
        return False
    infinite = top.args[0]
    if not calls(infinite, aten.eq.Scalar) or infinite.args[1] != math.inf:
        return False
    return calls(infinite.args[0], aten.abs.default) and infinite.args[0].args[0] is amax


def _result(x: fx.Node, top: fx.Node) -> fx.Node | None:
    shifted = next((u for u in top.users if calls(u, aten.sub.Tensor) and u.args == (x, top)), None)
    total = used_by(used_by(shifted, aten.exp.default), aten.sum.dim_IntList)
    log = used_by(total, aten.log.default)
    result = used_by(log, aten.add.Tensor)
    if result is None or result.kwargs or reduced_dims(total) != [val(x).dim() - 1]:
        return None
    return result if result.args[0] is log and elements_of(result.args[1]) is top else None


def _gradient(shifted: fx.Node) -> tuple[fx.Node, fx.Node]:
    exp = used_by(shifted, aten.exp.default)
    gradient = used_by(exp, aten.mul.Tensor)
    if gradient is None:
        raise LeftAlone(f"the backward uses its logsumexp otherwise, in {what(shifted)}")
    by = gradient.args[0] if gradient.args[1] is exp else gradient.args[1]
    if not same_shape(val(by).shape, [*val(gradient).shape[:-1], 1]):
        raise LeftAlone("the gradient of its logsumexp is not one number a row")
    return gradient, by


def _put_off(result: fx.Node, loss: ColumnLoss) -> None:
    """What is made of the result is computed after the loss's exchange."""
    made = walk([result], lambda n: (u for u in n.users if u < loss.log_sum))
    if loss.op in made or any(writes(n) or communicates(n) for n in made):
        raise LeftAlone("its logsumexp is needed before the loss is known")
    for node in sorted(made.keys() - {result}, reverse=True):
        loss.log_sum.append(node)


def put_log_sum_on_columns(loss: ColumnLoss, found: LogSum, paths: list[Path]) -> None:
    """Has the loss's exchange give the logarithms of the same rows' sums. ``paths``: of ``found.gradients``. LeftAlone:
    the loss needs it. The graph computes what it did."""
    _put_off(found.result, loss)
    own_of, at = OwnColumns(loss.columns), min(found.result.users)
    with undone_if_left():
        with put_for(at):
            replaced = {found.result: reshape(loss.log_sum, val(found.result).shape, at)}
        for (gradient, by), path in zip(found.gradients, paths, strict=True):
            at = path.end
            with put_for(at):
                x = cast(own_of.narrow(found.x, at), val(found.x).dtype, at)
                whole = of_all_ranks(by, loss.columns.c, at) if path.summed else by
                log_sum = reshape(loss.log_sum, val(by).shape, at)
                p = call(at, aten.exp.default, call(at, aten.sub.Tensor, x, log_sum))
                replaced[at] = follow(path, call(at, aten.mul.Tensor, p, whole), gradient, own_of)
    put_in_place(replaced, made_of([*replaced]))
