"""Ops of mixtures of experts, for small_runs.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from exact import DTYPES, fused, numbers, put, same
from weft import fused_ops
from weft.fused_ops.dispatch.plan import forced

EXPERTS, CHOICES = 5, 2


def sent_to_experts(rank: int, size: int, seed: int) -> None:
    """Tokens in one epoch and by rounds, some of which go nowhere; and back from experts that change nothing."""
    experts = 2 * size
    for tokens, hidden, dtype in ((3, 72, DTYPES[0]), (70, 136, DTYPES[1]), (700, 2048, DTYPES[0])):
        first = torch.arange(tokens) * 5 % (experts + 1)
        ids = torch.stack([first, (first + 1 + torch.arange(tokens) % experts) % (experts + 1)], 1)
        x, weights = numbers(seed, rank, dtype, tokens, hidden), torch.tensor([[1.0, 2.0]]).expand(tokens, 2)
        rows, _, handle = fused_ops.moe_dispatch(put(x), put(ids), experts, dist.group.WORLD, align=4)
        out = fused_ops.moe_combine(rows, handle, put(weights), dist.group.WORLD)
        fused()
        same("to experts and back", out, x.float() * (weights * (ids < experts)).sum(1, keepdim=True))


def experts(rank: int, size: int, seed: int) -> None:
    """Tiles that no rows fill, an expert without rows, choices of none; tokens by kernels and by copy engines; sums in
    one shot and in two, whole, in parts and normed."""
    group = dist.group.WORLD
    for part, k, n, dtype in (
        (3, 72, 16 * size, DTYPES[0]),
        (70, 136, 72 * size, DTYPES[0]),
        (5, 40, 16 * size, DTYPES[1]),
    ):
        tokens = part * size
        ids = (numbers(seed, 0, torch.int64, tokens, CHOICES) + 1) * 2 - (
            numbers(seed + 1, 0, torch.int64, tokens, 1) > 0
        ).long()
        on_cpu = fused_ops.moe_route(ids, EXPERTS)
        rows, offs, slots = fused_ops.moe_route(put(ids), EXPERTS)
        for found, want in zip((rows, offs, slots), on_cpu, strict=True):
            same("routes", found, want)
        shards = [numbers(seed + 2, r, dtype, part, k) for r in range(size)]
        B = numbers(seed + 3, rank, dtype, EXPERTS, n, k).mT
        x, bias = torch.cat(shards), numbers(seed + 4, rank, dtype, EXPERTS, n)
        there, of = (ids >= 0)[..., None], ids.clamp(min=0)
        want = (torch.einsum("tk,tjkn->tjn", x.float(), B.float()[of]) + bias.float()[of]) * there
        place = on_cpu[2].long().clamp(min=0)
        y = fused_ops.grouped_matmul(put(x), put(B), offs, rows=rows, bias=put(bias))
        same("grouped matmul", y.cpu()[place] * there, want)
        for algorithm in ("fused", "copy_engine"):
            with forced(algorithm):
                _, (y, z) = fused_ops.fused_all_gather_grouped_matmul(
                    put(shards[rank]), [put(B)] * 2, rows, offs, 0, group, biases=[put(bias)] * 2
                )
            fused()
            same("all-gather + grouped matmul", y.cpu()[place] * there, want)
            same("all-gather + grouped matmul of a second B", z.cpu()[place] * there, want)
        total = torch.zeros(tokens, n)
        weights = torch.tensor([[1.0, 2.0]]).expand(tokens, CHOICES)
        for r in range(size):
            A, of_rank = (
                numbers(seed + 5, r, dtype, tokens * CHOICES, k),
                numbers(seed + 6, r, dtype, EXPERTS, n, k).mT,
            )
            ys = torch.einsum("tjk,tjkn->tjn", A.float()[place], of_rank.float()[of]) * there
            total += (ys * weights[..., None]).sum(1)
        A, B = (
            numbers(seed + 5, rank, dtype, tokens * CHOICES, k),
            numbers(seed + 6, rank, dtype, EXPERTS, n, k).mT,
        )
        product = put(A), put(B), offs, slots, put(weights)
        same(
            "grouped matmul + all-reduce",
            fused_ops.fused_grouped_matmul_all_reduce(*product, "sum", group),
            total,
        )
        fused()
        for dim in (0, 1):
            out = fused_ops.fused_grouped_matmul_reduce_scatter(*product, "sum", dim, group)
            fused()
            same("grouped matmul + reduce-scatter", out, total.chunk(size, dim)[rank])
        given = (
            fused_ops.grouped_matmul(*product[:3]),
            slots,
            put(weights),
            None,
            put(torch.ones(n, dtype=dtype)),
            1e-5,
            group,
        )
        same("combine + norm", fused_ops.fused_moe_combine_all_reduce_rms_norm(*given)[1], total)
        fused()
