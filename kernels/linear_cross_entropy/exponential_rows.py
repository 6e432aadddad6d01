"""What is done with rows between the products of exponentials: a chunk's sums, and factors of rows.

A logit's gradient is ``factor * exponential``, but for the target's. So factors go to rows of x, of which the weight's
gradient is made, and to rows of x's gradient; what the target's exponential lacks is added to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Columns

_JOIN_BLOCK, _PARTS = 32, 32


@triton.jit
def join_kernel(
    sums,  # [parts, M]
    excess,  # [M], times log2(e)
    bases,  # [M], to which this is added
    log_sums,  # [M]: of other columns and, afterwards, of these, too
    parts,
    rows,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has = row < rows
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & has[None, :]
        total += tl.load(sums + part[:, None] * rows + row[None, :], mask=there, other=0.0)
    base = tl.load(bases + row, mask=has, other=0.0)
    base += tl.load(excess + row, mask=has, other=0.0) * 0.6931471805599453
    others = tl.exp(tl.load(log_sums + row, mask=has, other=0.0) - base)
    tl.store(bases + row, base, mask=has)
    tl.store(log_sums + row, base + tl.log(others + tl.sum(total, 0)), mask=has)


@triton.jit
def factor_kernel(
    x,  # [M, H]
    targets,  # [M]
    start,  # [1]
    terms,  # [5, M]
    bases,  # [M]
    scores,  # [M], of targets
    exponentials,  # [V, M]
    factors,  # [M]
    of_others,  # [5, M]: terms of which gradient_kernel makes exponentials like these
    out,  # [M, H]
    rows,
    columns,
    row_stride,
    column_stride,
    HIDDEN: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(bases + row)
    factor = tl.load(terms + rows + row) * tl.exp(base - tl.load(terms + row))
    lacks = tl.where(factor == 0, 0.0, tl.load(terms + 4 * rows + row) / factor)
    tl.store(factors + row, factor / TEMPERATURE)
    tl.store(of_others + row, base)
    tl.store(of_others + rows + row, TEMPERATURE)
    tl.store(of_others + 2 * rows + row, 0.0)
    tl.store(of_others + 3 * rows + row, 0.0)
    tl.store(of_others + 4 * rows + row, lacks * TEMPERATURE)
    at = tl.load(targets + row) - tl.load(start)
    if (at >= 0) & (at < columns):
        own = tl.exp(tl.load(scores + row) - base) + lacks
        tl.store(exponentials + at * column_stride + row, own.to(exponentials.dtype.element_ty))
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_stride + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
    value *= factor / TEMPERATURE
    tl.store(out + row * HIDDEN + at, value.to(out.dtype.element_ty), mask=at < HIDDEN)


@triton.jit
def by_factor_kernel(x, factors, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * HIDDEN + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
    factor = tl.load(factors + row)
    value = tl.where(factor == 0, 0.0, value * factor)  # a row that does not count, whatever was multiplied
    tl.store(x + row * HIDDEN + at, value.to(x.dtype.element_ty), mask=at < HIDDEN)


def launch_join(sums: Tensor, excess: Tensor, bases: Tensor, log_sums: Tensor) -> None:
    """Sums of exponentials [parts, M] with ``log_sums`` of other columns, as logarithms into these; in float32.

    Args:
        excess: [M], by which bases are raised, times log2(e).
    """
    parts, rows = sums.shape
    join_kernel[(triton.cdiv(rows, _JOIN_BLOCK),)](
        *(sums, excess, bases, log_sums, parts, rows), BLOCK=_JOIN_BLOCK, PARTS=_PARTS, num_warps=8
    )


def launch_factors(
    x: Tensor, columns: Columns, terms: Tensor, given: tuple[Tensor, Tensor], exponentials: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of x by their factors, the factors, terms that make other columns' logits such exponentials).

    Args:
        given: bases of rows, and their targets' scores.
        exponentials: [V, M]; targets' are made what gradients need.
    """
    rows, hidden = x.shape
    factors, of_others = terms.new_empty(rows), torch.empty_like(terms)
    scaled = x.new_empty(rows, hidden)
    factor_kernel[(rows,)](
        *(x, columns.targets, columns.start, terms, *given, exponentials, factors, of_others, scaled),
        *(rows, exponentials.shape[0], x.stride(0), exponentials.stride(0)),
        HIDDEN=hidden,
        TEMPERATURE=columns.scores.temperature,
        BLOCK=triton.next_power_of_2(hidden),
    )
    return scaled, factors, of_others


def launch_by_factor(x: Tensor, factors: Tensor) -> None:
    """Rows of x, which is contiguous, by their factors, in place."""
    hidden = x.shape[1]
    by_factor_kernel[(x.shape[0],)](x, factors, HIDDEN=hidden, BLOCK=triton.next_power_of_2(hidden))
