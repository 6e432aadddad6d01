"""A mixture's layer between ranks that share tokens and slice experts: what is compared, and a check by samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from accuracy import MAX_ERROR
from parts import random_tensor
from torch import Tensor
from torch.nn.functional import silu
from weft.fused_ops import (
    fused_all_gather_grouped_matmul,
    fused_grouped_matmul_reduce_scatter,
    grouped_matmul,
    moe_route,
)

_SAMPLES = 32


class Experts(NamedTuple):
    """Of M tokens in all, and E experts of this rank's width F."""

    shard: Tensor  # [M / W, H]
    tokens: Tensor  # [M, H], all ranks' shards
    up: Tensor  # [E, H, 2F], gate and up
    down: Tensor  # [E, F, H]
    between: Tensor  # [M * k, F], what ``down`` multiplies
    rows: Tensor
    offs: Tensor
    slots: Tensor
    weights: Tensor  # [M, k]


Form = Callable[[Experts], Tensor]


def random_experts(
    m: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Experts:
    """``shape``: hidden, width of all ranks, experts, choices of a token."""
    (hidden, width, experts, choices), world = shape, dist.get_world_size()
    torch.manual_seed(m)
    ids = torch.rand(m, experts, device=device).topk(choices, dim=1)[1]
    weights = torch.rand(m, choices, device=device)
    torch.manual_seed(1 + dist.get_rank())
    own = width // world
    shard, between = (random_tensor(s, dtype, device) for s in ((m // world, hidden), (m * choices, own)))
    up, down = (
        torch.empty(experts, n, k, device=device, dtype=dtype).normal_(0, k**-0.5).mT
        for k, n in ((hidden, 2 * own), (own, hidden))
    )
    tokens = torch.empty(m, hidden, device=device, dtype=dtype)
    dist.all_gather_into_tensor(tokens, shard)
    return Experts(shard, tokens, up, down, between, *moe_route(ids, experts), weights)


def _gathered(p: Experts) -> Tensor:
    tokens = torch.empty_like(p.tokens)
    dist.all_gather_into_tensor(tokens, p.shard)
    return tokens


def _product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    # torch's product of several groups in bfloat16 alone.
    return torch._grouped_mm(a, b, offs) if a.is_cuda else grouped_matmul(a, b, offs)


def _activated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return silu(gate) * up


def _combined(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    return (y[slots.long()] * weights[..., None]).sum(1).to(y.dtype)


def _scattered(total: Tensor) -> Tensor:
    out = total.new_empty(len(total) // dist.get_world_size(), total.shape[1])
    dist.reduce_scatter_tensor(out, total)
    return out


def layer_forms(compiles: bool) -> dict[str, dict[str, Form]]:
    """By op and contender. "product" is weft's alone, of what is there already."""
    activated = torch.compile(_activated, dynamic=False) if compiles else _activated
    combined = torch.compile(_combined, dynamic=False) if compiles else _combined

    def up(p: Experts, *, swiglu: bool = False) -> Tensor:
        return fused_all_gather_grouped_matmul(p.shard, [p.up], p.rows, p.offs, swiglu=swiglu)[1][0]

    def down(p: Experts, between: Tensor) -> Tensor:
        return fused_grouped_matmul_reduce_scatter(between, p.down, p.offs, p.slots, p.weights, "sum", 0)

    def torch_up(p: Experts) -> Tensor:
        return _product(_gathered(p)[p.rows.long()], p.up, p.offs)

    def torch_down(p: Experts, between: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        return _scattered(combine(_product(between, p.down, p.offs), p.slots, p.weights))

    def products(p: Experts) -> Tensor:
        grouped_matmul(p.tokens, p.up, p.offs, rows=p.rows)
        return grouped_matmul(p.between, p.down, p.offs)

    return {
        "all_gather_grouped_matmul": {
            "weft": up,
            "torch": torch_up,
            "product": lambda p: grouped_matmul(p.tokens, p.up, p.offs, rows=p.rows),
        },
        "grouped_matmul_reduce_scatter": {
            "weft": lambda p: down(p, p.between),
            "torch": lambda p: torch_down(p, p.between, _combined),
            "compiled": lambda p: torch_down(p, p.between, combined),
            "product": lambda p: grouped_matmul(p.between, p.down, p.offs),
        },
        "layer": {
            "weft": lambda p: down(p, up(p, swiglu=True)),
            "torch": lambda p: torch_down(p, _activated(torch_up(p)), _combined),
            "compiled": lambda p: torch_down(p, activated(torch_up(p)), combined),
            "product": products,
        },
    }


def _sampled(op: str, p: Experts) -> tuple[Tensor, Tensor]:
    """(Rows of this rank's result, what they are in float64). Collective."""
    m, world, rank = len(p.tokens), dist.get_world_size(), dist.get_rank()
    if op == "all_gather_grouped_matmul":
        at = torch.linspace(0, len(p.rows) - 1, _SAMPLES, device=p.rows.device).long()
        return at, _rows_of(p.tokens[p.rows[at].long()].double(), p.up, p.offs, at)
    t = torch.linspace(0, m - 1, _SAMPLES, device=p.rows.device).long()
    at = p.slots[t].long().flatten()
    if op == "layer":
        a = _activated(_rows_of(p.tokens[p.rows[at].long()].double(), p.up, p.offs, at))
    else:
        a = p.between[at].double()
    y = _rows_of(a, p.down, p.offs, at).view(len(t), -1, p.down.shape[2])
    total = (y * p.weights[t, :, None].double()).sum(1)
    dist.all_reduce(total)
    own = t.div(m // world, rounding_mode="floor") == rank
    return t[own] - rank * (m // world), total[own]


def _rows_of(a: Tensor, b: Tensor, offs: Tensor, at: Tensor) -> Tensor:
    """Rows ``at`` of a grouped product in float64, one by one: a copy of each row's expert would not fit."""
    experts = torch.searchsorted(offs, at.to(offs.dtype), right=True).tolist()
    return torch.stack([row @ b[e].double() for row, e in zip(a, experts, strict=True)])


def wrong_by_samples(op: str, out: Tensor, p: Experts) -> str:
    """What is wrong with an op's result by its sampled rows; empty when nothing is. Collective."""
    at, want = _sampled(op, p)
    error = float((out[at].double() - want).norm() / want.norm()) if len(at) else 0.0
    # A layer rounds three times one after the other: products of both, and what lies between.
    bound = MAX_ERROR[out.dtype] * (3 if op == "layer" else 2)
    return "" if error <= bound else f"wrong result: error {error:.1e}, at most {bound:.0e}"


def call_of(form: Form, p: Experts) -> Callable[[int], Sequence[Tensor]]:
    return lambda _: [form(p)]
