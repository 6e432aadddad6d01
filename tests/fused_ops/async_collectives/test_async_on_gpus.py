"""Collectives by copy engines on GPUs: late ranks, products on all SMs beside them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from opcommon import world
from ranks import on_ranks
from torch import Tensor
from weft.fused_ops import last_plan

pytestmark = pytest.mark.gpu
ops = torch.ops.weft
SHAPES = [(8, 8), (16, 24), (136, 1000), (512, 1024), (4096, 4096)]


@on_ranks(2, device="cuda")
def test_operands_that_are_copied(rank: int, world_size: int) -> None:
    """What is sent is a copy, which no peer has to know of."""
    base = torch.randn(1 + 64 * 64 * world_size)
    for x in (torch.randn(64, 64).t(), base[1 : 1 + 64 * 64].view(64, 64)):
        token = ops.all_gather_start(x, name())
        assert last_plan().algorithm == "copy_engine"
        assert torch.equal(ops.all_gather_wait(token, x, name()), every(x.contiguous()).flatten(0, 1))
    y = base[1:].view(64 * world_size, 64)
    token = ops.reduce_scatter_start(y, "sum", name())
    assert torch.equal(ops.reduce_scatter_wait(token, y, name()), summed(y.clone(), "sum", rank))


def name() -> str:
    return world().group_name


def every(x: Tensor) -> Tensor:
    """All ranks' x, [W, ...]."""
    out = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(out, x)
    return out


def summed(y: Tensor, op: str, rank: int) -> Tensor:
    """In float32 and rank order, rounded once."""
    parts = every(y).float()
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return (total / len(parts) if op == "avg" else total).chunk(len(parts))[rank].to(y.dtype)


@on_ranks([2, 4], device="cuda")
def test_results_beside_products(rank: int, world_size: int) -> None:
    for turn in range(12):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rows, columns in SHAPES:
                x = torch.randn(rows, columns).to(dtype)
                y, other = torch.randn(rows * world_size, columns).to(dtype), x * 2
                op = ("sum", "avg")[turn % 2]
                if turn % world_size == rank:
                    torch.cuda._sleep(2_000_000)
                begun = [ops.all_gather_start(t, name()) for t in (x, other)]
                placed = [ops.all_gather_start(t, name(), placed=True) for t in (x, other)]
                scattered = ops.reduce_scatter_start(y, op, name())
                assert last_plan().algorithm == "copy_engine"
                torch.full_like(y, torch.nan)  # in memory that results may get
                x.double() @ x.double().t() if rows <= 512 else x @ x  # on all SMs
                want = every(x).flatten(0, 1)
                assert torch.equal(ops.reduce_scatter_wait(scattered, y, name()), summed(y, op, rank))
                for i, t in reversed(list(enumerate((x, other)))):
                    assert torch.equal(ops.all_gather_wait(begun[i], t, name()), want * (i + 1))
                    whole = ops.all_gather_wait(placed[i], t, name(), placed=True)
                    assert torch.equal(whole, want * (i + 1))
                    ops.all_gather_release(placed[i], whole, name())
