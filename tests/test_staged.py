"""The process group of ranks that share a GPU, between CPU ranks; they share one only where it is asked for."""

from __future__ import annotations

import pytest
import staged
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft import symm_mem


@on_ranks(3, fresh=True)
def test_what_it_computes(rank: int, size: int) -> None:
    staged.register()
    group = dist.new_group(backend=staged.NAME)
    ops, name = torch.ops._c10d_functional, group.group_name
    x = torch.arange(6.0).view(3, 2) + 10 * rank
    parts = [torch.arange(6.0).view(3, 2) + 10 * r for r in range(size)]
    whole, total = torch.cat(parts), sum(parts)
    begun = group._get_sequence_number_for_group()

    assert torch.equal(ops.wait_tensor(ops.all_gather_into_tensor(x, size, name)), whole)
    rows = torch.cat([x] * size)
    assert torch.equal(ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", size, name)), total)
    assert torch.equal(ops.wait_tensor(ops.reduce_scatter_tensor(rows, "avg", size, name)), total / size)
    assert torch.equal(ops.wait_tensor(ops.all_reduce(x, "avg", name)), total / size)
    assert torch.equal(ops.wait_tensor(ops.all_reduce(x, "max", name)), parts[-1])

    out = torch.empty(3 * size, 2)
    dist.all_gather_into_tensor(out, x, group=group)
    assert torch.equal(out, whole)
    outs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outs, x.t(), group=group)
    assert all(torch.equal(a, b.t()) for a, b in zip(outs, parts, strict=True))
    own = torch.empty(3, 2)
    dist.reduce_scatter_tensor(own, rows, group=group)
    assert torch.equal(own, total)
    dist.broadcast(x, 1, group=group)
    assert torch.equal(x, parts[1])
    said: list[int | None] = [None] * size
    dist.all_gather_object(said, rank, group=group)
    assert said == list(range(size))
    dist.barrier(group=group)
    assert group._get_sequence_number_for_group() > begun


def refused(rank: int, size: int) -> str | None:
    return symm_mem.unavailable(None, "cuda")


@pytest.mark.gpu(1)
def test_gpus_are_shared_only_where_it_is_asked_for() -> None:
    for said in run_ranks(refused, 2, device="cuda", gpus=1, env={"WEFT_SHARE_GPUS": "0"}, fresh=True):
        assert said is not None and "ranks 0 and 1 share one GPU" in said and "WEFT_SHARE_GPUS=1" in said
