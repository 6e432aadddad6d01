"""fused_linear_cross_entropy: statistics of rows of ``x @ weight.t()`` whose columns the ranks share, and gradients.

Statistics are two to four float32 numbers of each row and rank, which are all-gathered: once a call, or where the
rows' losses are summed, once a chunk. A chunk's logits then still exist when all is known that their gradient needs but
one factor. It is made at once, and the backward multiplies what was made by that factor: three products instead of
four. Without a sum each row has a factor of its own, so the backward makes the logits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.linear_cross_entropy.reference import (
    EXTRAS,
    Columns,
    Loss,
    Scores,
    combine,
    count_statistics,
    gradient_terms,
)
from ....symm_mem import is_checked, resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice
from ...dispatch.tensor_guards import needs_no_dispatch
from .. import all_gather
from ..gradients import SumGradient, refuse_second_gradient
from ..op import Op, on_device
from . import chunks

Gather: TypeAlias = Callable[[Tensor], Tensor]


class LinearCrossEntropyCall(NamedTuple):
    """
    Attributes:
        x: [..., H], or without a weight the logits [..., V of this rank].
        vocab_start: the first of this rank's columns; None: after those of the ranks before.
        summed: the losses' sum is wanted, else each row's statistics.
        mean: of the rows that are not ignored, in place of the sum.
        partial_x: gradients of x are to be this rank's part of their sum.
        of_x, of_weight, of_bias: whose unit gradients are wanted with the sum.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    targets: Tensor
    group_name: str
    vocab_start: int | None = None
    summed: bool = False
    mean: bool = False
    extra: str = ""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    partial_x: bool = False
    of_x: bool = False
    of_weight: bool = False
    of_bias: bool = False
    group_size: int | None = None

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        return self.of_x, self.of_weight, self.of_bias

    @property
    def loss(self) -> Loss:
        return Loss(self.ignore_index, self.label_smoothing, self.z_loss)

    @property
    def columns_here(self) -> int:
        return self.x.shape[-1] if self.weight is None else self.weight.shape[0]


def _validate(call: LinearCrossEntropyCall) -> tuple[LinearCrossEntropyCall, ProcessGroup]:
    group = resolve_group(call.group_name)
    x, weight, bias, targets = call.x, call.weight, call.bias, call.targets
    name = "logits_shard" if weight is None else "x"
    validation.left_operand(name, x)
    if weight is not None:
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"weight_shard: has shape {tuple(weight.shape)}, must be [V, {x.shape[-1]}]: this rank's rows of "
                "nn.Linear's weight, as long as a row of x"
            )
        validation.like_tensor("weight_shard", weight, x, name)
    if bias is not None:
        if bias.dim() != 1 or bias.shape[0] != call.columns_here:
            raise ValueError(f"bias: has shape {tuple(bias.shape)}, must be [{call.columns_here}]")
        validation.like_tensor("bias", bias, x, name)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets: is {targets.dtype}, must be int64")
    validation.must_have_shape("targets", targets, x.shape[:-1], f", as {name} has rows")
    validation.same_device("targets", targets, x, name)
    _validate_numbers(call)
    return call, group


def _validate_numbers(call: LinearCrossEntropyCall) -> None:
    if call.extra not in EXTRAS:
        raise ValueError(f"extra: is {call.extra!r}, must be {validation.one_of(EXTRAS)}")
    if call.vocab_start is not None and call.vocab_start < 0:
        raise ValueError(f"vocab_start: is {call.vocab_start}, must be 0 or more")
    if not 0 <= call.label_smoothing <= 1:
        raise ValueError(f"label_smoothing: is {call.label_smoothing}, must be from 0 to 1")
    if not 0 <= call.z_loss < math.inf:
        raise ValueError(f"z_loss: is {call.z_loss}, must be finite, and 0 or more")
    for name, value in (("softcap", call.softcap), ("temperature", call.temperature)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: is {value}, must be finite and above 0")
    if call.summed and (call.weight is None or (call.extra == "mean") != (call.label_smoothing > 0)):
        raise ValueError(
            "summed: is True, must be False without a weight, or with another extra than the loss has"
        )


def _choose(call: LinearCrossEntropyCall, group: ProcessGroup) -> Choice:
    """That of the first exchange of statistics."""
    rows = call.targets.numel()
    hidden = call.x.shape[-1] if call.of_weight else 0
    first = chunks.chunks_of(rows, hidden)[0].stop if call.summed else rows
    sent = call.x.new_empty(count_statistics(call.extra), first, dtype=torch.float32)
    return all_gather.choose_gather(all_gather.AllGatherCall(sent, 0, call.group_name), group)


def _run(
    op: str, choice: Choice, where: Heap | None, call: LinearCrossEntropyCall, group: ProcessGroup
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The sum, or statistics [K, M] of all ranks' columns; ``_bounds``; unit gradients."""
    gather = partial(all_gather.gather_within, group=group, op=op)
    x = call.x.flatten(0, -2)
    with on_device(x):
        if call.weight is None:
            parts = iter([(slice(None), [chunks.with_rows(x)])])
        else:
            found = chunks.Gradients(call.x, call.weight, call.bias, call.wanted)
            parts = chunks.logits_by_chunks(x, call.weight, call.bias, found)
        bounds, scores = _bounds(call, gather, group.rank()), Scores(call.softcap, call.temperature)
        columns = Columns(call.targets.reshape(-1), bounds[:1], scores, call.extra)
        if call.summed:
            return _sum(call, columns, gather, parts, found), bounds, found.found()
        sent = torch.cat([chunks.statistics(logits, columns.rows(rows)) for rows, logits in parts], 1)
        return combine(_gathered(sent, gather), call.extra), bounds, []


def _sum(
    call: LinearCrossEntropyCall,
    columns: Columns,
    gather: Gather,
    parts: Iterator[tuple[slice, list[Tensor]]],
    found: chunks.Gradients,
) -> Tensor:
    losses, count = [], (columns.targets != call.ignore_index).sum() if call.mean else None
    for rows, logits in parts:
        part = columns.rows(rows)
        gathered = _gathered(chunks.statistics(logits, part), gather)
        of_rows, terms = chunks.row_losses(gathered, part.targets, call.loss, count)
        losses.append(of_rows)
        if any(call.wanted):
            chunks.gradient_(logits, part, terms)
            found.add(rows, logits)
    total = torch.cat(losses).sum()
    return total if count is None else total / count


def _bounds(call: LinearCrossEntropyCall, gather: Gather, rank: int) -> Tensor:
    """[2]: this rank's first column, and how many columns all ranks have, 0 where that is not asked for.

    Without a number the ranks tell each other how many they have, at every call: a rank cannot know whether another
    one has as many as before.
    """
    here, start = call.columns_here, call.vocab_start
    if start is not None and not is_checked():
        bounds = torch.zeros(2, dtype=torch.int64, device=call.x.device)
        bounds[:1].fill_(start)
        return bounds
    number = torch.full((1,), here + (start or 0), dtype=torch.int64, device=call.x.device)
    every = gather(number)
    if start is None:
        return torch.stack([every[:rank].sum(), every.sum()])
    return torch.stack([number[0] - here, every.max()])


def _gathered(sent: Tensor, gather: Gather) -> Tensor:
    """[W, K, M]"""
    gathered = gather(sent)
    return gathered.view(gathered.shape[0] // sent.shape[0], *sent.shape)


def _fake(call: LinearCrossEntropyCall, group: ProcessGroup) -> tuple[Tensor, Tensor, list[Tensor]]:
    shape = [] if call.summed else [count_statistics(call.extra), call.targets.numel()]
    values = call.x.new_empty(shape, dtype=torch.float32)
    gradients = chunks.fake_gradients(call.x, call.weight, call.bias, call.wanted)
    return values, call.targets.new_empty(2), gradients


def _spread(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """As autograd takes them, None where none is wanted."""
    left = iter(gradients)
    return [next(left) if each else None for each in wanted]


class SummedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, call: LinearCrossEntropyCall, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.op = op.name
        ctx.wanted, ctx.multiplied = tuple(ctx.needs_input_grad[2:]), False
        of_x, of_weight, of_bias = ctx.wanted
        call = call._replace(of_x=of_x, of_weight=of_weight, of_bias=of_bias)
        total, bounds, gradients = op.run_below_autograd(call)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(bounds)
        return total, bounds

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        refuse_second_gradient(ctx.op)
        if ctx.multiplied:
            raise RuntimeError(
                f"{ctx.op}: its backward has run, which overwrites what the forward has made for it; where it must run "
                "again, ask for reduction='none'"
            )
        gradients = ctx.saved_tensors
        if needs_no_dispatch(grad, *gradients):
            ctx.multiplied = True  # in place: the weight's gradient is the largest tensor of all
            gradients = [chunks.multiply_(g, grad) for g in gradients]
        else:
            gradients = [chunks.multiplied(g, grad) for g in gradients]
        return None, None, *_spread(gradients, ctx.wanted)


class RowStatisticsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: Op, call: LinearCrossEntropyCall, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        values, bounds, _ = op.run_below_autograd(call)
        ctx.save_for_backward(*given, call.targets, bounds, values)
        ctx.op = op.name
        ctx.scored = call.extra, call.softcap, call.temperature
        ctx.mark_non_differentiable(bounds)
        return values, bounds

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        refuse_second_gradient(ctx.op)
        *given, values = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[2:])
        terms = gradient_terms(values, grad, ctx.scored[0])
        gradients = torch.ops.weft.linear_cross_entropy_gradients(*given, terms, *ctx.scored, wanted)
        return None, None, *_spread(gradients, wanted)


def _with_gradient(op: Op, call: LinearCrossEntropyCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    x = call.x
    if call.weight is not None and not call.partial_x:
        x = SumGradient.apply(x, call.group_name, call.group_size)
    function = SummedLossFunction if call.summed else RowStatisticsFunction
    values, bounds = function.apply(op, call, x, call.weight, call.bias)
    return values, bounds, []


def _flops(
    x: Sequence[int], weight: Any, *_: Any, of_x: bool = False, of_weight: bool = False, **__: Any
) -> int:
    return 0 if weight is None else 2 * (1 + of_x + of_weight) * math.prod(x) * weight[0]


def _named(name: str) -> Op:
    """All compute the same: their functions make different things of it, and errors say which one was called."""
    op: Op = Op(
        f"{name}(Tensor x, Tensor? weight, Tensor? bias, Tensor targets, str group_name, *, int? vocab_start=None,"
        " bool summed=False, bool mean=False, str extra='', int ignore_index=-100, float label_smoothing=0.0,"
        " float z_loss=0.0, float? softcap=None, float temperature=1.0, bool partial_x=False, bool of_x=False,"
        " bool of_weight=False, bool of_bias=False, int? group_size=None) -> (Tensor, Tensor, Tensor[])",
        record=LinearCrossEntropyCall,
        validate=_validate,
        fake=_fake,
        kernel="all_gather",
        sends_nothing=lambda call, group: call.targets.numel() == 0,
        choose=_choose,
        run=partial(_run, name),
        with_gradient=lambda call: _with_gradient(op, call),
        flops=_flops,
        own_dims={"x": (-1,), "weight": (0,), "bias": (0,)},
        own_on_cuda=True,
        own_values=("vocab_start",),
    )
    return op


LINEAR_CROSS_ENTROPY = _named("fused_linear_cross_entropy")
LINEAR_LOG_PROBS = _named("fused_linear_log_probs")
CROSS_ENTROPY_OF_SHARDED_LOGITS = _named("cross_entropy_of_sharded_logits")
