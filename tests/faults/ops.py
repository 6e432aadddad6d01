"""The public ops as the tables of faults call them. An op that has an entry in ``OPS`` goes through every fault.

Numbers are so small that every sum is exact: a result that a call returns is right to the bit, or it is a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from case import Case, numbers
from exchange_ops import (
    exchanged,
    exchanged_and_multiplied,
    gathered_to_one,
    multiplied_and_gathered,
    product_exchanged,
)
from weft import fused_ops
from weft.kernels.device.collective.combine import Combined
from weft.kernels.moe_dispatch.reference import ExpertRanks, rows_by_expert, take_tokens


def _gathered(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    m, k, n = 2 * unit + 3 * more, 8 * unit, 5 * unit if unit == 1 else 8 * unit
    shards = [numbers(100 * step + r, m, k) for r in range(size)]
    b = numbers(1000 + rank, k, n)

    def call(a: torch.Tensor) -> torch.Tensor:
        return fused_ops.fused_all_gather_matmul(a, [b], 0, group, return_A=False)[1][0]

    longer = torch.cat([shards[rank], shards[rank][:1]])
    return Case(lambda: call(shards[rank]), lambda: torch.cat(shards) @ b, lambda: call(longer))


def _scattered(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    rows = unit + more if unit == 1 else 2 * unit + 8 * more
    m, k, n = rows * size, 8 * unit, 6 * unit if unit == 1 else 8 * unit
    a = [numbers(100 * step + r, m, k) for r in range(size)]
    b = [numbers(1000 + r, k, n) for r in range(size)]
    wide = torch.cat([b[rank], b[rank][:, : 8 if unit > 1 else 1]], 1)

    def call(b: torch.Tensor) -> torch.Tensor:
        return fused_ops.fused_matmul_reduce_scatter(a[rank], b, "sum", 0, group)

    def want() -> torch.Tensor:
        return sum(x @ y for x, y in zip(a, b, strict=True)).chunk(size)[rank]

    return Case(lambda: call(b[rank]), want, lambda: call(wide))


def _gathered_fp8(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    m, k, n = 2 * unit + 3 * more, 16 * unit, 16
    shards = [numbers(100 * step + r, m, k) for r in range(size)]
    b, scale = numbers(1000 + rank, n, k), 3 + numbers(2000 + rank, 1, n).float()
    scales = [
        3 + numbers(200 * step + r, m, 1).float() for r in range(size)
    ]  # of rows, which travel with them
    weight = b.to(torch.float8_e4m3fn).t()

    def call(a: torch.Tensor, a_scale: torch.Tensor) -> torch.Tensor:
        given = a, [weight], a_scale, [scale], 0, group
        return fused_ops.fused_all_gather_scaled_matmul(*given, out_dtypes=[torch.float32], return_A=False)[
            1
        ][0]

    def want() -> torch.Tensor:
        return torch.cat(shards).float() @ b.float().t() * torch.cat(scales) * scale

    # Cast before a call: in a forked child CUDA itself would refuse that.
    mine = shards[rank].to(torch.float8_e4m3fn)
    longer = torch.cat([shards[rank], shards[rank][:1]]).to(torch.float8_e4m3fn)
    more_scales = torch.cat([scales[rank], scales[rank][:1]])
    return Case(lambda: call(mine, scales[rank]), want, lambda: call(longer, more_scales))


def _scattered_fp8(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    rows = unit + more if unit == 1 else 2 * unit + 8 * more
    m, k, n = rows * size, 16 * unit, 16
    a = [numbers(100 * step + r, m, k) for r in range(size)]
    b = [numbers(1000 + r, n, k) for r in range(size)]
    one, dtype = torch.ones(()), torch.float8_e4m3fn
    mine, weight = a[rank].to(dtype), b[rank].to(dtype).t()

    def call(reduce_op: str) -> torch.Tensor:
        given = mine, weight, one, one, reduce_op, 0, group
        return fused_ops.fused_scaled_matmul_reduce_scatter(*given, out_dtype=a[rank].dtype)

    def want() -> torch.Tensor:
        return sum(x @ y.t() for x, y in zip(a, b, strict=True)).chunk(size)[rank]

    return Case(lambda: call("sum"), want, lambda: call("avg"))


def _reduced(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    xs = [numbers(100 * step + r, 7 * unit + more) for r in range(size)]
    return Case(
        lambda: fused_ops.one_shot_all_reduce(xs[rank], "sum", group),
        lambda: sum(xs),
        lambda: fused_ops.one_shot_all_reduce(xs[rank], "avg", group),
    )


def _reduced_in_place(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    xs = [numbers(100 * step + r, 7 * unit + more) for r in range(size)]
    mine = xs[rank].clone()

    def call(reduce_op: str) -> torch.Tensor:
        mine.copy_(xs[rank])
        assert fused_ops.one_shot_all_reduce_(mine, reduce_op, group) is mine
        return mine

    return Case(lambda: call("sum"), lambda: sum(xs), lambda: call("max"))


def _gathered_alone(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    xs = [numbers(100 * step + r, 3, 7 * unit + more) for r in range(size)]
    return Case(
        lambda: fused_ops.one_shot_all_gather(xs[rank], 1, group),
        lambda: torch.cat(xs, 1),
        lambda: fused_ops.one_shot_all_gather(xs[rank], 0, group),
    )


def _scattered_alone(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    xs = [numbers(100 * step + r, size, (7 * unit + more) * size) for r in range(size)]
    return Case(
        lambda: fused_ops.one_shot_reduce_scatter(xs[rank], "sum", 1, group),
        lambda: sum(xs).chunk(size, 1)[rank],
        lambda: fused_ops.one_shot_reduce_scatter(xs[rank], "sum", 0, group),
    )


def _reduced_product(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    # Between CPU ranks the parts of the rows are uneven, and the last ranks may have none.
    m, k, n = (1 if unit == 1 else 2 * unit) + 3 * more, 8 * unit, 6 * unit if unit == 1 else 8 * unit
    a = [numbers(100 * step + r, m, k) for r in range(size)]
    b = [numbers(1000 + r, k, n) for r in range(size)]
    return Case(
        lambda: fused_ops.fused_matmul_all_reduce(a[rank], b[rank], "sum", group),
        lambda: sum(x @ y for x, y in zip(a, b, strict=True)),
        lambda: fused_ops.fused_matmul_all_reduce(a[rank], b[rank], "avg", group),
    )


def _normed(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    """Every sum is 8 or -8, so that the norm is exact, too. Residuals and weights differ from rank to rank."""
    rows, hidden = 2 * unit + more, 5 if unit == 1 else 8 * unit
    xs = [numbers(100 * step + r, rows, hidden) for r in range(size)]
    signs = 2 * numbers(2000 + 100 * step + rank, rows, hidden).abs() - 1
    residual, weight = 8 * signs - sum(xs), 3 + numbers(3000 + rank, hidden)

    def call(eps: float) -> torch.Tensor:
        return torch.stack(fused_ops.fused_all_reduce_rms_norm(xs[rank], residual, weight, eps, group))

    return Case(lambda: call(0.0), lambda: torch.stack([signs * weight, 8 * signs]), lambda: call(1.0))


def _layer_normed(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    """Every sum is 24 or 8, each in half of its row, so that mean and root are exact."""
    rows, hidden = 2 * unit + more, 6 if unit == 1 else 8 * unit
    xs = [numbers(100 * step + r, rows, hidden) for r in range(size)]
    signs = 2 * numbers(4000 + 100 * step + rank, rows, hidden // 2).abs() - 1
    signs = torch.cat([signs, -signs], 1)
    residual = 16 + 8 * signs - sum(xs)
    weight, bias = (3 + numbers(seed + rank, hidden) for seed in (5000, 6000))

    def call(eps: float) -> torch.Tensor:
        return torch.stack(
            fused_ops.fused_all_reduce_layer_norm(xs[rank], residual, weight, bias, eps, group)
        )

    return Case(
        lambda: call(0.0), lambda: torch.stack([signs * weight + bias, 16 + 8 * signs]), lambda: call(1.0)
    )


def _normed_in_fp8(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    """As ``_normed``: what is 2 to 4, or its negative, is a number of fp8."""
    rows, hidden = 2 * unit + more, 5 if unit == 1 else 8 * unit
    xs = [numbers(100 * step + r, rows, hidden) for r in range(size)]
    signs = 2 * numbers(7000 + 100 * step + rank, rows, hidden).abs() - 1
    residual, weight = 8 * signs - sum(xs), 3 + numbers(8000 + rank, hidden)
    one = torch.ones((), device=residual.device)

    def call(scale_op: str) -> torch.Tensor:
        given = xs[rank], residual, weight, 0.0, group
        quantized, _, sums = fused_ops.fused_all_reduce_rms_norm_quant(*given, scale=one, scale_op=scale_op)
        return torch.stack([quantized.float(), sums])

    return Case(
        lambda: call("divide"), lambda: torch.stack([signs * weight, 8 * signs]), lambda: call("multiply")
    )


def _loss(rank: int, size: int, step: int, unit: int, group: Any, more: int, of: str = "loss") -> Case:
    """One column of the last rank is so far above all others that a row's sum of exponentials is its own."""
    rows, hidden, columns = 2 * unit + more, 8, 5 * unit
    x = numbers(100 * step, rows, hidden)
    x[:, 0] = 1
    weights = [numbers(9000 + r, columns, hidden) for r in range(size)]
    weights[-1][0] = 0
    weights[-1][0, 0] = 1024
    targets = torch.arange(rows, device=x.device) % (columns * size)
    logits = x @ weights[rank].t()
    wanted = 1024 - (x @ torch.cat(weights).t()).gather(1, targets.unsqueeze(1)).squeeze(1).float()

    def call(temperature: float) -> torch.Tensor:
        given = x, weights[rank], targets, group
        if of == "log-probabilities":
            return -fused_ops.fused_linear_log_probs(*given, temperature=temperature)
        if of == "logits":
            return fused_ops.cross_entropy_of_sharded_logits(
                logits, targets, group, reduction="none", temperature=temperature
            )
        return fused_ops.fused_linear_cross_entropy(*given, reduction="none", temperature=temperature)

    return Case(lambda: call(1.0), lambda: wanted, lambda: call(2.0))


def _gathered_to_experts(rank: int, size: int, step: int, unit: int, group: Any, more: int) -> Case:
    """Each token goes to two of three experts."""
    tokens, k, n = (2 * unit + more) * size, 8 * unit, 16
    shards = [numbers(100 * step + r, tokens // size, k) for r in range(size)]
    B = numbers(9500 + rank, 3, k, n)
    ids = torch.stack([torch.arange(tokens) % 3, torch.arange(tokens) // 2 % 3], 1).to(B.device)
    rows, offs, slots = fused_ops.moe_route(ids, 3)

    def call(return_A: bool) -> torch.Tensor:
        given = shards[rank], [B], rows, offs, 0, group
        return fused_ops.fused_all_gather_grouped_matmul(*given, return_A=return_A)[1][0][slots.long()]

    def wanted() -> torch.Tensor:
        return torch.einsum("tk,tjkn->tjn", torch.cat(shards), B[ids])

    return Case(lambda: call(False), wanted, lambda: call(True))


def _combined(rank: int, size: int, step: int, unit: int, group: Any, more: int, kind: str = "sum") -> Case:
    """Two choices of each token, in reverse, and the second one's weight is 2; the norm's sums are 8 or -8."""
    tokens, hidden = (2 * unit + more) * size, (5 if unit == 1 else 8 * unit) * size
    ys = [numbers(100 * step + r, 2 * tokens, hidden) for r in range(size)]
    slots = torch.arange(2 * tokens, dtype=torch.int32, device=ys[0].device).flip(0).view(tokens, 2)
    weights = torch.tensor([[1.0, 2.0]], device=ys[0].device).expand(tokens, 2)
    total = sum(y.flip(0)[0::2] + 2 * y.flip(0)[1::2] for y in ys)
    signs = 2 * numbers(2000 + 100 * step + rank, tokens, hidden).abs() - 1
    residual, weight, given = 8 * signs - total, 3 + numbers(3000 + rank, hidden), (ys[rank], slots, weights)

    def call(number: int) -> torch.Tensor:
        if kind == "norm":
            normed = fused_ops.fused_moe_combine_all_reduce_rms_norm(
                *given, residual, weight, float(number), group
            )
            return torch.stack(normed)
        if kind == "part":
            return fused_ops.fused_moe_combine_reduce_scatter(*given, number, group)
        half = [*given] if not number else [ys[rank], slots[: tokens // 2], weights[: tokens // 2]]
        return fused_ops.fused_moe_combine_all_reduce(*half, group)

    def want() -> torch.Tensor:
        if kind == "norm":
            return torch.stack([signs * weight, 8 * signs])
        return total.chunk(size)[rank] if kind == "part" else total

    return Case(lambda: call(0), want, lambda: call(1))


def _multiplied_and_combined(
    rank: int, size: int, step: int, unit: int, group: Any, more: int, *, part: bool
) -> Case:
    """Two of three experts of each token; the second choice's weight is 2."""
    tokens, k, n = (2 * unit + more) * size, 8 * unit, 8 * size
    As = [numbers(100 * step + r, 2 * tokens, k) for r in range(size)]
    Bs = [numbers(9700 + r, 3, k, n) for r in range(size)]
    ids = torch.stack([torch.arange(tokens) % 3, torch.arange(tokens) // 2 % 3], 1).to(As[0].device)
    _, offs, slots = fused_ops.moe_route(ids, 3)
    weights = torch.tensor([[1.0, 2.0]], device=As[0].device).expand(tokens, 2)
    product = As[rank], Bs[rank], offs

    def call(number: int) -> torch.Tensor:
        if part:
            return fused_ops.fused_grouped_matmul_reduce_scatter(
                *product, slots, weights, "sum", number, group
            )
        half = tokens // 2
        chosen = (slots[:half], weights[:half]) if number else (slots, weights)
        return fused_ops.fused_grouped_matmul_all_reduce(*product, *chosen, "sum", group)

    def want() -> torch.Tensor:
        rows = zip(As, Bs, strict=True)
        ys = [torch.einsum("tjk,tjkn->tjn", A[slots.long()], B[ids]) for A, B in rows]
        total = sum(y[:, 0] + 2 * y[:, 1] for y in ys)
        return total.chunk(size)[rank] if part else total

    return Case(lambda: call(0), want, lambda: call(1))


def _sent_to_experts(
    rank: int, size: int, step: int, unit: int, group: Any, more: int, *, back: bool
) -> Case:
    """Two of two experts a rank for each token, with weights 1 and 2; ``back``: from them."""
    tokens, hidden, experts = 2 * unit + more, 8 * unit, 2 * size
    xs = [numbers(100 * step + r, tokens, hidden) for r in range(size)]
    first = (torch.arange(tokens * size) % experts).to(xs[0].device)
    ids = torch.stack([first, (first + 1) % experts], 1)
    capacity, weights = 2 * tokens * size, torch.tensor([[1.0, 2.0]], device=first.device).expand(tokens, 2)
    handles = []
    for r in range(size):
        of = ExpertRanks(experts, size, r, 1)
        _, *routed = fused_ops.moe_route(ids, experts, first_expert=of.first, num_local_experts=of.each)
        handles.append(fused_ops.MoeHandle(*rows_by_expert(ids, (routed[0], routed[1]), of, capacity)[1:4]))
    own = slice(rank * tokens, (rank + 1) * tokens)
    if not back:
        # A forked child may not even slice on a GPU.
        every, given, there = torch.cat(xs), (xs[rank], ids[own], experts, group), handles[rank].choices
        there = there[there >= 0]

        def rows(align: int) -> torch.Tensor:
            return fused_ops.moe_dispatch(*given, capacity=capacity, align=align)[0][: len(there)]

        return Case(lambda: rows(1), lambda: take_tokens(every, there, 2), lambda: rows(2))
    ys = [numbers(9800 + r, capacity, hidden) for r in range(size)]
    parts = [Combined(y, h.slots[own], weights, None).total() for y, h in zip(ys, handles, strict=True)]
    return Case(
        lambda: fused_ops.moe_combine(ys[rank], handles[rank], weights, group),
        lambda: sum(parts),
        lambda: fused_ops.moe_combine(ys[rank][:, :8].repeat(1, 2), handles[rank], weights, group),
    )


# Rank, ranks, step (which numbers), unit of the sizes, group, and by how much the sizes are larger.
OPS: dict[str, Callable[[int, int, int, int, Any, int], Case]] = {
    "fused_all_gather_matmul": _gathered,
    "fused_matmul_reduce_scatter": _scattered,
    "fused_all_gather_scaled_matmul": _gathered_fp8,
    "fused_scaled_matmul_reduce_scatter": _scattered_fp8,
    "fused_matmul_all_reduce": _reduced_product,
    "one_shot_all_reduce": _reduced,
    "one_shot_all_reduce_": _reduced_in_place,
    "one_shot_all_gather": _gathered_alone,
    "one_shot_reduce_scatter": _scattered_alone,
    "fused_all_reduce_rms_norm": _normed,
    "fused_all_reduce_layer_norm": _layer_normed,
    "fused_all_reduce_rms_norm_quant": _normed_in_fp8,
    "fused_all_gather_grouped_matmul": _gathered_to_experts,
    "fused_grouped_matmul_all_reduce": partial(_multiplied_and_combined, part=False),
    "fused_grouped_matmul_reduce_scatter": partial(_multiplied_and_combined, part=True),
    "fused_linear_cross_entropy": _loss,
    "fused_linear_log_probs": partial(_loss, of="log-probabilities"),
    "cross_entropy_of_sharded_logits": partial(_loss, of="logits"),
    "fused_moe_combine_all_reduce": _combined,
    "fused_moe_combine_all_reduce_rms_norm": partial(_combined, kind="norm"),
    "fused_moe_combine_reduce_scatter": partial(_combined, kind="part"),
    "one_shot_all_to_all": exchanged,
    "one_shot_gather": gathered_to_one,
    "fused_matmul_all_to_all": product_exchanged,
    "fused_matmul_all_gather": multiplied_and_gathered,
    "fused_all_to_all_matmul": exchanged_and_multiplied,
    "moe_dispatch": partial(_sent_to_experts, back=False),
    "moe_combine": partial(_sent_to_experts, back=True),
}
