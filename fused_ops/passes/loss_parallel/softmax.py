"""A log-softmax of gathered columns and what picks targets from it, and the gradient that a joint graph makes of it, as
torch decomposes ``cross_entropy``.

    shifted = x - amax(x); log_probs = shifted - log(sum(exp(shifted))); picked = gather(log_probs, targets)
    of_x = of_log_probs - exp(log_probs) * sum(of_log_probs), where of_log_probs is a number at the target, 0 elsewhere

Smoothed labels take the log-probabilities' sum, too, whose gradient all columns of ``of_log_probs`` have. What is
picked and summed may be negated before, as transformers' ``LabelSmoother`` does it. Of logits in 16 bits
log-probabilities are rounded, too: those of targets stay so, a sum is made of them before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily

from ..graph.nodes import RESHAPES, LeftAlone, aten, calls, only_user, some, used_by, val, what
from ..graph.row_wise import reduces_rows
from ..graph.sizes import known, same_shape
from .columns import CAST


@dataclass(frozen=True)
class Gradient:
    """``scale * onehot(targets) * by + sign * each`` through a log-softmax: ``result``, of all columns."""

    result: fx.Node
    targets: fx.Node  # [..., 1]
    scale: float
    by: fx.Node  # as many
    each: fx.Node | None  # [..., 1]
    sign: int


@dataclass(frozen=True)
class LogSoftmax:
    """
    Attributes:
        x: [..., V], float32.
        sign: what picked and total are multiplied with: 1 or -1.
        picked: those of targets, [..., 1].
        total: the sum of all columns', for smoothed labels.
        gradients: what the backward makes of the log-softmax.
    """

    x: fx.Node
    sign: int
    picked: fx.Node
    total: fx.Node | None
    gradients: tuple[Gradient, ...]

    @property
    def targets(self) -> fx.Node:
        return self.picked.args[2]  # type: ignore[return-value]


def log_softmax_of(x: fx.Node) -> LogSoftmax | None:
    """LeftAlone: more than targets' log-probabilities is needed."""
    maxima = (u for u in x.users if reduces_rows(u, aten.amax.default, x))
    log_probs = next(filter(None, (log_probs_of(x, amax, lambda total: total) for amax in maxima)), None)
    if log_probs is None:
        return None
    if val(x).dim() < 2 or val(x).dtype != torch.float32:
        raise LeftAlone(f"its log-softmax is in {val(x).dtype}, not of rows in float32")
    last = val(x).dim() - 1
    source = used_by(log_probs, CAST) or log_probs
    wide = [u for u in source.users if calls(u, CAST)]
    exponentials = [u for n in (source, *wide) for u in n.users if calls(u, aten.exp.default)]
    used: Any = next((u for u in source.users if calls(u, aten.neg.default)), source)
    others = [u for n in {source, *wide} - {used} for u in n.users if u not in (*exponentials, *wide, used)]
    picked = [u for u in used.users if calls(u, aten.gather.default) and u.args[1] in (last, -1)]
    totals = [u for u in used.users if calls(u, aten.sum.dim_IntList) and u.args[1] in ([last], [-1])]
    if others := others + [u for u in used.users if u not in (*picked, *exponentials, *wide, *totals[:1])]:
        raise LeftAlone(f"its log-softmax is used by {some(others)}, too")
    if len(picked) != 1 or not same_shape(val(picked[0]).shape, [*val(x).shape[:-1], 1]):
        raise LeftAlone("of its log-softmax not one target's in each row is used")
    total = totals[0] if totals else None
    if total is not None and total < picked[0]:
        raise LeftAlone("its log-softmax is summed before the targets' log-probabilities are taken")
    gradients = tuple(_gradient(u) for e in exponentials for u in e.users)
    return LogSoftmax(x, 1 if used is source else -1, picked[0], total, gradients)


def log_probs_of(x: fx.Node, amax: fx.Node, of_all: Callable[[fx.Node], fx.Node | None]) -> fx.Node | None:
    """What a log-softmax of ``x``, whose maximum this is, results in. ``of_all``: from a sum of columns to that of all
    columns."""
    shifted = used_by(amax, aten.sub.Tensor)
    if shifted is None or shifted.args != (x, amax) or len(shifted.users) != 2:
        return None
    exp: Any = next((u for u in shifted.users if calls(u, aten.exp.default)), None)
    total: Any = only_user(exp)
    if not reduces_rows(total, aten.sum.dim_IntList, exp) or (whole := of_all(total)) is None:
        return None
    log = used_by(whole, aten.log.default)
    result = used_by(log, aten.sub.Tensor)
    return result if result is not None and result.args == (shifted, log) else None


def _gradient(of_sum: Any) -> Gradient:
    """``of_log_probs - exp(log_probs) * sum(of_log_probs)``, of its product. LeftAlone: it is something else."""
    result = used_by(of_sum, aten.sub.Tensor)
    why = LeftAlone(f"the backward uses its softmax otherwise, in {what(of_sum)}")
    if not calls(of_sum, aten.mul.Tensor) or result is None or result.args[1] is not of_sum:
        raise why
    of_targets, total = result.args[0], of_sum.args[1]
    if not reduces_rows(total, aten.sum.dim_IntList, of_targets):
        raise why
    each, sign, of_targets = None, 1, _uncast(of_targets)
    if calls(of_targets, aten.neg.default):
        of_targets, sign = of_targets.args[0], -1
    if calls(of_targets, aten.add.Tensor) and calls(_uncast(of_targets.args[0]), aten.expand.default):
        each, of_targets = _uncast(of_targets.args[0]).args[0], of_targets.args[1]
        if not same_shape(val(each).shape, val(total).shape):
            raise why
    if (found := _scattered(of_targets)) is None:
        raise why
    targets, scale, by = found
    if not known(val(by).numel() == val(total).numel()):
        raise why
    return Gradient(result, targets, sign * scale, by, each, sign)


def _uncast(node: Any) -> Any:
    return node.args[0] if calls(node, CAST) else node


def _scattered(node: Any) -> tuple[fx.Node, float, fx.Node] | None:
    """(targets [..., 1], number, by) of what is a number times ``by`` at each row's target, and 0 elsewhere."""
    if calls(node, aten.scatter_add.default):
        zeros, dim, targets, by = node.args
        along = number_of(zeros) == 0 and dim in (-1, val(node).dim() - 1)
        return (targets, 1.0, by) if along and known(val(targets).shape[-1] == 1) else None
    for hot, by in (node.args, node.args[::-1]) if calls(node, aten.mul.Tensor) else ():
        if (found := _hot(_uncast(hot))) is not None:
            return *found, by
    return None


def _hot(node: Any) -> tuple[fx.Node, float] | None:
    """(targets [M, 1], number) of what is a number at each row's target, and 0 elsewhere."""
    if calls(node, aten.scatter.value) and number_of(node.args[0]) == 0 and node.args[1] in (1, -1):
        return node.args[2], float(node.args[3])
    if not calls(node, aten.where.self) or not calls(node.args[0], aten.eq.Tensor):
        return None
    targets, columns = node.args[0].args
    while calls(columns, *RESHAPES, aten.unsqueeze.default, aten.expand.default):
        columns = columns.args[0]
    named = columns.kwargs if calls(columns, torch.ops.prims.iota.default) else {}
    number = number_of(node.args[1])
    if named.get("start") != 0 or named.get("step") != 1 or number is None or number_of(node.args[2]) != 0:
        return None
    if not known(columns.args[0] == val(node).shape[1]):
        return None
    return (targets.args[0] if calls(targets, aten.expand.default) else targets), number


def number_of(node: Any) -> float | None:
    """What all elements of the node are; None if that is not known."""
    if calls(node, aten.full.default) and isinstance(node.args[1], (int, float)):
        return float(node.args[1])
    if calls(node, aten.scalar_tensor.default) and isinstance(node.args[0], (int, float)):
        return float(node.args[0])
    if calls(node, aten.lift_fresh_copy.default):
        return number_of(node.args[0])
    if isinstance(node, fx.Node) and node.op == "get_attr":
        constant = getattr(node.graph.owning_module, str(node.target), None)
        if isinstance(constant, torch.Tensor) and constant.numel() == 1 and not is_fake(constant):
            with unset_fake_temporarily():
                return float(constant)
    return None
