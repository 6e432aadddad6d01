"""Groups of torch's fake backend, by which one process tries out what one rank of many does: ops run unfused there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import fused_ops, symm_mem


def one_of_four(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    for group in (None, dist.new_group([0, 1])):
        words = symm_mem.unavailable(group, "cpu")
        assert words is not None and "its backend 'fake' has no processes" in words
        size = symm_mem.resolve_group(group).size()
        up = fused_ops.ColumnParallelLinear(8, 12, group=group, sequence_parallel=True)
        down = fused_ops.RowParallelLinear(12, 8, group=group, sequence_parallel=True)
        x = torch.randn(3, 8, requires_grad=True)
        y = up(x)
        assert fused_ops.last_plan().algorithm == "unfused" and y.shape == (3 * size, 12 // size)
        down(y).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert fused_ops.one_shot_all_reduce(y.detach(), "max", group).shape == y.shape
        assert fused_ops.fused_all_reduce_rms_norm(x, x, up.weight[0], 0.1, group)[1].shape == x.shape
        symm_mem.reset(group)


def test_ops_run_unfused() -> None:
    run_ranks(one_of_four, 1, fresh=True)
