"""All-to-alls, alone and around products, and the gather, for the tables of faults."""

from __future__ import annotations

from typing import Any

import torch
from case import Case, numbers
from weft import fused_ops


def exchanged(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    xs = [numbers(100 * step + r, size, (7 * unit + more) * size) for r in range(size)]
    return Case(
        lambda: fused_ops.one_shot_all_to_all(xs[rank], 1, 0, group),
        lambda: torch.cat([x.chunk(size, 1)[rank] for x in xs]),
        lambda: fused_ops.one_shot_all_to_all(xs[rank], 0, 1, group),
    )


def gathered_to_one(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    xs, root = [numbers(100 * step + r, 3, 7 * unit + more) for r in range(size)], size - 1
    return Case(
        lambda: fused_ops.one_shot_gather(xs[rank], 1, root, group),
        lambda: torch.cat(xs, 1) if rank == root else xs[rank][:, :0],
        lambda: fused_ops.one_shot_gather(xs[rank], 1, 0, group),
    )


def product_exchanged(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    k, n = 8 * unit, 8 * unit
    xs = [numbers(100 * step + r, 3 * unit + more, k) for r in range(size)]
    b = numbers(1000, k, n * size)
    return Case(
        lambda: fused_ops.fused_matmul_all_to_all(xs[rank], b, 0, group),
        lambda: torch.cat([(x @ b).chunk(size, 1)[rank] for x in xs]),
        lambda: fused_ops.fused_matmul_all_to_all(xs[rank][:-1], b, 0, group),
    )


def multiplied_and_gathered(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    k, n = 8 * unit, 8 * unit
    x = numbers(100 * step, 3 * unit + more, k)
    bs = [numbers(1000 + r, k, n) for r in range(size)]
    return Case(
        lambda: fused_ops.fused_matmul_all_gather(x, bs[rank], group),
        lambda: x @ torch.cat(bs, 1),
        lambda: fused_ops.fused_matmul_all_gather(x[:-1], bs[rank], group),
    )


def exchanged_and_multiplied(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    k, n = 8 * unit, 8 * unit
    xs = [numbers(100 * step + r, size * (3 * unit + more), k) for r in range(size)]
    b = numbers(1000 + rank, k * size, n)
    return Case(
        lambda: fused_ops.fused_all_to_all_matmul(xs[rank], b, 0, group),
        lambda: torch.cat([x.chunk(size)[rank] for x in xs], 1) @ b,
        lambda: fused_ops.fused_all_to_all_matmul(xs[rank][:-size], b, 0, group),
    )
