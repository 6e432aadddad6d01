"""The end of a mixture's layer while it decodes, in CUDA graphs: experts' outputs weighted and added up, all-reduced,
with the residual and the norm. weft's one kernel; torch.compile's sum, then ``fused_all_reduce_rms_norm``; the same
with NCCL and torch.compile's norm; and ``fused_all_reduce_rms_norm`` alone, of what is added up already: the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timer import Schedule, Series, medians
from torch import Tensor
from torch.nn.functional import rms_norm

EPS = 1e-6
SHAPES = [(2048, 8), (4096, 2), (4096, 8), (7168, 8)]  # hidden, choices
TOKENS = (1, 8, 64, 512)


class Tail(NamedTuple):
    y: Tensor  # [T * k, H]
    slots: Tensor  # [T, k]
    weights: Tensor
    shared: Tensor  # [T, H]
    residual: Tensor
    weight: Tensor  # [H]


def added_up(p: Tail) -> Tensor:
    rows = p.y[p.slots.long()] * p.weights[..., None]
    return (rows.sum(1) + p.shared).to(p.y.dtype)


def after(total: Tensor, p: Tail) -> tuple[Tensor, Tensor]:
    sums = p.residual + total
    return rms_norm(sums, sums.shape[-1:], p.weight, EPS), sums


def random_tail(tokens: int, hidden: int, choices: int, device: torch.device) -> Tail:
    order = torch.randperm(tokens * choices, device=device).to(torch.int32)
    y, shared, residual, weight = (
        torch.randn(*shape, hidden, device=device, dtype=torch.bfloat16)
        for shape in ((tokens * choices,), (tokens,), (tokens,), ())
    )
    weights = torch.rand(tokens, choices, device=device)
    return Tail(y, order.view(tokens, choices), weights, shared, residual, weight)


def tail_row(tokens: int, hidden: int, choices: int) -> dict[str, Any]:
    from weft.fused_ops import fused_all_reduce_rms_norm, fused_moe_combine_all_reduce_rms_norm

    device = torch.device("cuda", torch.cuda.current_device())
    sets = [random_tail(tokens, hidden, choices, device) for _ in range(4)]
    totals = [added_up(p) for p in sets]
    torch._dynamo.reset()
    sum_of, norm_of = torch.compile(added_up, dynamic=False), torch.compile(after, dynamic=False)

    def weft(i: int) -> Sequence[Tensor]:
        y, slots, weights, shared, residual, weight = sets[i]
        return fused_moe_combine_all_reduce_rms_norm(y, slots, weights, residual, weight, EPS, shared=shared)

    def separate(i: int) -> Sequence[Tensor]:
        return fused_all_reduce_rms_norm(sum_of(sets[i]), sets[i].residual, sets[i].weight, EPS)

    def nccl(i: int) -> Sequence[Tensor]:
        total = sum_of(sets[i])
        dist.all_reduce(total)
        return norm_of(total, sets[i])

    def norm(i: int) -> Sequence[Tensor]:
        return fused_all_reduce_rms_norm(totals[i], sets[i].residual, sets[i].weight, EPS)

    calls = {"weft": weft, "separate": separate, "compiled": nccl, "norm": norm}
    schedule = Schedule(calls=20)
    series = {name: Series(call, len(sets), schedule, "graph", device) for name, call in calls.items()}
    times = medians(series, 1, device)
    row: dict[str, Any] = {"op": "tail", "M": tokens, "H": hidden, "k": choices}
    row |= {"world_size": dist.get_world_size(), **{f"{name}_us": us for name, us in times.items()}}
    row["limit_us"] = row["norm_us"]
    p = sets[0]
    exact = (p.y.double()[p.slots.long()] * p.weights.double()[..., None]).sum(1) + p.shared.double()
    dist.all_reduce(exact)
    for name, one in series.items():
        want = exact + p.residual.double()
        row[f"{name}_error"] = ((one.last[1].double() - want).norm() / want.norm()).item()
    return row
