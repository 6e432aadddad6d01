"""What reads every logit of a rank on CUDA: statistics of rows, and the gradient in place of the logits. And what lies
between: rows' losses, of all ranks' statistics. And what multiplies gradients by what the backward brings.

``statistics_kernel`` reads logits [M, V] once, one program a row, with a running maximum. ``loss_kernel`` has one
program for BLOCK rows, in place of some thirty operators, which the host would launch while the GPU waits.
``gradient_kernel`` has one program for each BLOCK columns of a row. All compute in float32, wait for nobody and are
graph-safe; ``reference.py`` says what of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Columns, Loss, count_statistics

_ROW_BLOCK, _ROW_WARPS = 8192, 16
_BLOCK, _WARPS = 4096, 8
_LOSS_BLOCK = 128
_MULTIPLY_BLOCK = 16384


@triton.jit
def _scores(logits, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    scores = logits.to(tl.float32)
    if CAP > 0:
        # tanh, which the interpreter lacks; at large arguments exp is infinite, and the quotient 0.
        scores = CAP * (1 - 2 / (tl.exp(scores * (2 / CAP)) + 1))
    return scores / TEMPERATURE


@triton.jit
def statistics_kernel(
    logits,  # [M, V]
    targets,  # [M]
    start,  # [1]
    out,  # [K, M]
    columns,
    row_stride,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    MEAN: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    at = tl.load(targets + row) - tl.load(start)
    top = tl.full((), float("-inf"), tl.float32)
    target = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    extra = tl.full((), 0.0, tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        there = column < columns
        score = _scores(tl.load(logits + row * row_stride + column, mask=there, other=0.0), CAP, TEMPERATURE)
        if MEAN:
            extra += tl.sum(tl.where(there, score, 0.0), 0)
        score = tl.where(there, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no score is above -inf yet
        weight, scale = tl.exp(score - base), tl.exp(top - base)
        total = total * scale + tl.sum(weight, 0)
        if ENTROPY:
            extra = extra * scale + tl.sum(tl.where(weight > 0, weight * score, 0.0), 0)
        target = tl.maximum(target, tl.max(tl.where(column == at, score, float("-inf")), 0))
        top = higher
    log_sum = top + tl.log(total)
    tl.store(out + row, log_sum)
    tl.store(out + rows + row, target)
    if MEAN:
        tl.store(out + 2 * rows + row, extra)
        tl.store(out + 3 * rows + row, tl.zeros((), tl.float32) + columns)
    if ENTROPY:
        tl.store(out + 2 * rows + row, tl.where(total > 0, log_sum - extra / total, 0.0))


@triton.jit
def loss_kernel(
    gathered,  # [W, K, M]
    targets,  # [M]
    count,  # [1]; None: nothing is divided
    losses,  # [M]
    terms,  # [5, M]
    rows,
    ignore_index,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    RANKS: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    target = tl.full((BLOCK,), float("-inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        of_rank = gathered + rank * STATISTICS * rows
        top = tl.maximum(top, tl.load(of_rank + row, mask=there, other=0.0))
        target = tl.maximum(target, tl.load(of_rank + rows + row, mask=there, other=0.0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    scores = tl.zeros((BLOCK,), tl.float32)
    columns = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        of_rank = gathered + rank * STATISTICS * rows
        total += tl.exp(tl.load(of_rank + row, mask=there, other=0.0) - base)
        if SMOOTHING > 0:
            scores += tl.load(of_rank + 2 * rows + row, mask=there, other=0.0)
            columns += tl.load(of_rank + 3 * rows + row, mask=there, other=1.0)
    log_sum = base + tl.log(total)
    loss = log_sum - (1 - SMOOTHING) * target
    if SMOOTHING > 0:
        loss -= SMOOTHING * (scores / columns)
    if Z_LOSS > 0:
        loss += Z_LOSS * (log_sum * log_sum)
    here = tl.load(targets + row, mask=there, other=0) != ignore_index
    tl.store(losses + row, tl.where(here, loss, 0.0), mask=there)
    by = tl.where(here, 1.0, 0.0)
    if count is not None:
        by /= tl.maximum(tl.load(count), 1).to(tl.float32)
    tl.store(terms + row, log_sum, mask=there)
    tl.store(terms + rows + row, (1 + 2 * Z_LOSS * log_sum) * by, mask=there)
    tl.store(terms + 2 * rows + row, tl.zeros((BLOCK,), tl.float32), mask=there)
    if SMOOTHING > 0:
        tl.store(terms + 3 * rows + row, -SMOOTHING * by / columns, mask=there)
    else:
        tl.store(terms + 3 * rows + row, tl.zeros((BLOCK,), tl.float32), mask=there)
    tl.store(terms + 4 * rows + row, (SMOOTHING - 1) * by, mask=there)


@triton.jit
def gradient_kernel(
    logits,  # [M, V]
    targets,  # [M]
    start,  # [1]
    terms,  # [5, M]
    out,  # [M, V]; may be the logits
    columns,
    row_stride,
    out_stride,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    at = tl.load(targets + row) - tl.load(start)
    log_sum, a, b = tl.load(terms + row), tl.load(terms + rows + row), tl.load(terms + 2 * rows + row)
    c, d = tl.load(terms + 3 * rows + row), tl.load(terms + 4 * rows + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    score = _scores(tl.load(logits + row * row_stride + column, mask=there, other=0.0), CAP, TEMPERATURE)
    p = tl.exp(score - log_sum)
    if ENTROPY:
        gradient = p * (a - b * score)
    else:
        gradient = p * a
    gradient = tl.where(p == 0, 0.0, gradient) + c
    gradient = tl.where(column == at, gradient + d, gradient)
    if CAP > 0:
        capped = score * (TEMPERATURE / CAP)
        gradient *= 1 - capped * capped
    tl.store(out + row * out_stride + column, (gradient / TEMPERATURE).to(out.dtype.element_ty), mask=there)


@triton.jit
def multiply_kernel(x, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:  # a loss whose backward is called is not multiplied by anything: then nothing is read
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = at < count
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * by
        tl.store(x + at, value.to(x.dtype.element_ty), mask=there)


def _constants(columns: Columns) -> dict[str, float | bool]:
    scores = columns.scores
    return {
        "CAP": scores.softcap or 0.0,
        "TEMPERATURE": scores.temperature,
        "ENTROPY": columns.extra == "entropy",
    }


def launch_statistics(logits: Tensor, columns: Columns) -> Tensor:
    """As ``reference_statistics``; each row of logits is contiguous."""
    rows, count = logits.shape
    out = torch.empty(count_statistics(columns.extra), rows, device=logits.device)
    if rows:
        statistics_kernel[(rows,)](
            *(logits, columns.targets, columns.start, out, count, logits.stride(0)),
            **_constants(columns),
            MEAN=columns.extra == "mean",
            BLOCK=_ROW_BLOCK,
            num_warps=_ROW_WARPS,
        )
    return out


def launch_losses(
    gathered: Tensor, targets: Tensor, loss: Loss, count: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As ``losses_and_terms``."""
    ranks, statistics, rows = gathered.shape
    losses, terms = (torch.empty(*lead, rows, device=gathered.device) for lead in ((), (5,)))
    if rows:
        loss_kernel[(triton.cdiv(rows, _LOSS_BLOCK),)](
            *(gathered, targets, count, losses, terms, rows, loss.ignore_index),
            SMOOTHING=loss.label_smoothing,
            Z_LOSS=loss.z_loss,
            RANKS=ranks,
            STATISTICS=statistics,
            BLOCK=_LOSS_BLOCK,
        )
    return losses, terms


def launch_gradient(logits: Tensor, columns: Columns, terms: Tensor, out: Tensor) -> None:
    """As ``reference_gradient``; each row of both is contiguous, and so are ``terms``."""
    rows, count = logits.shape
    if rows and count:
        gradient_kernel[(rows, triton.cdiv(count, _BLOCK))](
            *(logits, columns.targets, columns.start, terms, out, count, logits.stride(0), out.stride(0)),
            **_constants(columns),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def launch_multiply(x: Tensor, factor: Tensor) -> None:
    """x, which is dense, by a number in float32, in place."""
    if x.numel():
        multiply_kernel[(triton.cdiv(x.numel(), _MULTIPLY_BLOCK),)](
            *(x, factor, x.numel()), BLOCK=_MULTIPLY_BLOCK, num_warps=_ROW_WARPS
        )
