"""What reads every logit of a rank on CUDA: statistics of rows, and the gradient in place of the logits. And what lies
between: rows' losses, of all ranks' statistics. And what multiplies gradients by what the backward brings.

``statistics_kernel`` reads logits [M, V] once, in tiles; along the rows or along the columns these are contiguous. A
program has one tile's rows and SPAN columns, with a maximum and a sum for each element of the tile: nothing is reduced
before the end. ``combine_kernel`` joins what the programs of a row have found. ``loss_kernel`` has one program for
BLOCK rows, in place of some thirty operators, which the host would launch while the GPU waits. ``gradient_kernel`` has
one program a tile. All compute in float32, wait for nobody and are graph-safe; ``reference.py`` says what of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Columns, Loss, count_statistics


class LogitTile(NamedTuple):
    """Of logits."""

    rows: int
    columns: int
    warps: int


# Statistics, gradient: of logits whose rows are contiguous, and of such whose columns are. 16 bytes a thread and load.
_STATISTICS = LogitTile(1, 1024, 4), LogitTile(64, 16, 4)
_GRADIENT = LogitTile(1, 2048, 4), LogitTile(64, 64, 2)
_LOADS = 4, 8  # at once, before their maximum is taken
# A multiple of the loads' columns, as is a quarter of it, which a program has where few would run.
_SPAN = 16384, 2048
_FEW = 1024
_COMBINE_BLOCK = 32
_LOSS_BLOCK = 128
_MULTIPLY_BLOCK, _MULTIPLY_WARPS = 16384, 16
_MULTIPLY_PROGRAMS = 1024


@triton.jit
def _scores(logits, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    scores = logits.to(tl.float32)
    if CAP > 0:
        # tanh, which the interpreter lacks; at large arguments exp is infinite, and the quotient 0.
        scores = CAP * (1 - 2 / (tl.exp(scores * (2 / CAP)) + 1))
    return scores / TEMPERATURE


@triton.jit
def _scores_at(of_row, column, there, column_stride, CAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    at = of_row[:, None] + column.to(tl.int64)[None, :] * column_stride
    score = _scores(tl.load(at, mask=there, other=float("-inf")), CAP, TEMPERATURE)
    if CAP > 0:  # which -inf does not pass
        score = tl.where(there, score, float("-inf"))
    return score


@triton.jit
def statistics_kernel(
    logits,  # [M, V]
    targets,  # [M]
    start,  # [1]
    out,  # [programs of a row, 3 or 4, M]
    rows,
    columns,
    first,  # column of these logits, of this rank's
    row_stride,
    column_stride,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    MEAN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOADS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    has = row < rows
    of_row = logits + row.to(tl.int64) * row_stride
    begin = tl.program_id(1) * SPAN
    end = tl.minimum(begin + SPAN, columns)
    top = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    extra = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(begin, end, LOADS * COLUMNS):
        scores = ()
        higher = top
        for i in tl.static_range(LOADS):
            column = at + i * COLUMNS + tl.arange(0, COLUMNS)
            there = has[:, None] & (column < end)[None, :]
            score = _scores_at(of_row, column, there, column_stride, CAP, TEMPERATURE)
            if MEAN:
                extra += tl.where(there, score, 0.0)
            higher = tl.maximum(higher, score)
            scores = scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no score is above -inf yet
        scale = tl.exp(top - base)
        total *= scale
        if ENTROPY:
            extra *= scale
        for i in tl.static_range(LOADS):
            weight = tl.exp(scores[i] - base)
            total += weight
            if ENTROPY:
                extra += tl.where(weight > 0, weight * scores[i], 0.0)
        top = higher
    highest = tl.max(top, 1)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    scale = tl.exp(top - base[:, None])
    at = tl.load(targets + row, mask=has, other=0) - tl.load(start) - first
    here = has & (at >= begin) & (at < end)
    target = _scores(tl.load(of_row + at * column_stride, mask=here, other=0.0), CAP, TEMPERATURE)
    of_program = out + tl.program_id(1).to(tl.int64) * (4 if MEAN or ENTROPY else 3) * rows + row
    tl.store(of_program, highest, mask=has)
    tl.store(of_program + rows, tl.sum(total * scale, 1), mask=has)
    tl.store(of_program + 2 * rows, tl.where(here, target, float("-inf")), mask=has)
    if MEAN:
        tl.store(of_program + 3 * rows, tl.sum(extra, 1), mask=has)
    if ENTROPY:
        tl.store(of_program + 3 * rows, tl.sum(extra * scale, 1), mask=has)


@triton.jit
def combine_kernel(
    found,  # [programs of a row, 3 or 4, M]
    out,  # [K, M]
    rows,
    columns,
    programs,
    MEAN: tl.constexpr,
    ENTROPY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has = row < rows
    program = tl.arange(0, PROGRAMS)
    there = (program < programs)[:, None] & has[None, :]
    at = found + program.to(tl.int64)[:, None] * (4 if MEAN or ENTROPY else 3) * rows + row[None, :]
    tops = tl.load(at, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    scale = tl.exp(tops - base[None, :])
    total = tl.sum(tl.load(at + rows, mask=there, other=0.0) * scale, 0)
    log_sum = base + tl.log(total)
    tl.store(out + row, log_sum, mask=has)
    target = tl.max(tl.load(at + 2 * rows, mask=there, other=float("-inf")), 0)
    tl.store(out + rows + row, target, mask=has)
    if MEAN:
        tl.store(out + 2 * rows + row, tl.sum(tl.load(at + 3 * rows, mask=there, other=0.0), 0), mask=has)
        tl.store(out + 3 * rows + row, tl.zeros((BLOCK,), tl.float32) + columns, mask=has)
    if ENTROPY:
        extra = tl.sum(tl.load(at + 3 * rows, mask=there, other=0.0) * scale, 0)
        tl.store(out + 2 * rows + row, tl.where(total > 0, log_sum - extra / total, 0.0), mask=has)


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
    TARGET_WEIGHT: tl.constexpr,
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
    loss = log_sum - TARGET_WEIGHT * target
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
    rows,
    columns,
    first,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has = row < rows
    there = has[:, None] & (column < columns)[None, :]
    at = tl.load(targets + row, mask=has, other=0) - tl.load(start) - first
    at = tl.where((at >= 0) & (at < columns), at, -1).to(tl.int32)  # compared with each column
    log_sum = tl.load(terms + row, mask=has, other=0.0)[:, None]
    a = tl.load(terms + rows + row, mask=has, other=0.0)[:, None]
    b = tl.load(terms + 2 * rows + row, mask=has, other=0.0)[:, None]
    c = tl.load(terms + 3 * rows + row, mask=has, other=0.0)[:, None]
    d = tl.load(terms + 4 * rows + row, mask=has, other=0.0)[:, None]
    wide_row, wide_column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    score = tl.load(logits + wide_row * row_stride + wide_column * column_stride, mask=there, other=0.0)
    score = _scores(score, CAP, TEMPERATURE)
    p = tl.exp(score - log_sum)
    if ENTROPY:
        gradient = p * (a - b * score)
    else:
        gradient = p * a
    gradient = tl.where(p == 0, 0.0, gradient) + c
    gradient = tl.where(column[None, :] == at[:, None], gradient + d, gradient)
    if CAP > 0:
        capped = score * (TEMPERATURE / CAP)
        gradient *= 1 - capped * capped
    at_out = out + wide_row * out_row_stride + wide_column * out_column_stride
    tl.store(at_out, (gradient / TEMPERATURE).to(out.dtype.element_ty), mask=there)


@triton.jit
def multiply_kernel(x, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:  # a loss whose backward is called is not multiplied by anything: then nothing is read
        begin, step = tl.program_id(0).to(tl.int64) * BLOCK, tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(begin, count, step):
            at = first + tl.arange(0, BLOCK)
            there = at < count
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            # Those of an ignored row stay, whatever the factor is.
            value = tl.where(value == 0, 0.0, value * by)
            tl.store(x + at, value.to(x.dtype.element_ty), mask=there)


def _along_rows(logits: Tensor) -> bool:
    """Whether it is a column, not a row, that is contiguous."""
    return logits.stride(1) != 1


def _constants(columns: Columns) -> dict[str, float | bool]:
    scores = columns.scores
    return {
        "CAP": scores.softcap or 0.0,
        "TEMPERATURE": scores.temperature,
        "ENTROPY": columns.extra == "entropy",
    }


def _span(logits: Tensor) -> int:
    """Columns of a program."""
    along, (rows, count) = _along_rows(logits), logits.shape
    span = _SPAN[along]
    few = triton.cdiv(rows, _STATISTICS[along].rows) * triton.cdiv(count, span) < _FEW
    return span // 4 if few and count <= 32 * span else span  # all that a row has found are combined at once


def launch_statistics(parts: Sequence[Tensor], columns: Columns) -> Tensor:
    """As ``reference_statistics``, of logits whose parts' columns follow each other."""
    rows = parts[0].shape[0]
    out = torch.empty(count_statistics(columns.extra), rows, device=parts[0].device)
    if not rows:
        return out
    spans = [_span(logits) for logits in parts]
    programs = [triton.cdiv(max(t.shape[1], 1), span) for t, span in zip(parts, spans, strict=True)]
    mean, entropy = columns.extra == "mean", columns.extra == "entropy"
    found = torch.empty(sum(programs), 4 if mean or entropy else 3, rows, device=out.device)
    first = done = 0
    for logits, span, count in zip(parts, spans, programs, strict=True):
        along = _along_rows(logits)
        tile = _STATISTICS[along]
        statistics_kernel[(triton.cdiv(rows, tile.rows), count)](
            *(logits, columns.targets, columns.start, found[done:], rows, logits.shape[1], first),
            *logits.stride(),
            **_constants(columns),
            MEAN=mean,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            LOADS=_LOADS[along],
            SPAN=span,
            num_warps=tile.warps,
        )
        first, done = first + logits.shape[1], done + count
    combine_kernel[(triton.cdiv(rows, _COMBINE_BLOCK),)](
        *(found, out, rows, first, done),
        MEAN=mean,
        ENTROPY=entropy,
        PROGRAMS=triton.next_power_of_2(done),
        BLOCK=_COMBINE_BLOCK,
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
            TARGET_WEIGHT=loss.target_weight,
            Z_LOSS=loss.z_loss,
            RANKS=ranks,
            STATISTICS=statistics,
            BLOCK=_LOSS_BLOCK,
        )
    return losses, terms


def launch_gradient(logits: Tensor, columns: Columns, terms: Tensor, out: Tensor) -> None:
    """As ``reference_gradient``; ``terms`` are contiguous."""
    rows, count = logits.shape
    if rows and count:
        tile = _GRADIENT[_along_rows(logits)]
        gradient_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(count, tile.columns))](
            *(logits, columns.targets, columns.start, terms, out, rows, count, columns.first),
            *logits.stride(),
            *out.stride(),
            **_constants(columns),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
        )


def launch_multiply(x: Tensor, factor: Tensor) -> None:
    """x, which is dense, by a number in float32, in place; zeros stay."""
    if x.numel():
        multiply_kernel[(min(triton.cdiv(x.numel(), _MULTIPLY_BLOCK), _MULTIPLY_PROGRAMS),)](
            *(x, factor, x.numel()), BLOCK=_MULTIPLY_BLOCK, num_warps=_MULTIPLY_WARPS
        )
