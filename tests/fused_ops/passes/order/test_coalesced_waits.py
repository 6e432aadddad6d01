"""A wait for one result of a coalesced collective is one for all: its operands are read no more, its results are there.

Inductor's code relies on it, which uses an operand again when its own result was waited for.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

c10d = torch.ops._c10d_functional


def waited_for_once(rank: int, world: int, backend: str, late: int) -> None:
    import weft

    del weft  # it has the backend
    group = dist.new_group(backend=backend)
    name = group.group_name
    for turn in range(5):
        operands = [torch.full((n,), 10.0 * turn + rank) for n in (300_000, 7, 200_000)]
        if rank == late:
            time.sleep(0.05)
        outs = c10d.all_gather_into_tensor_coalesced(operands, world, name)
        c10d.wait_tensor(outs[1])
        for operand in operands:
            operand.fill_(-1)
        parts = [torch.arange(float(n * world)) for n in (200_000, 5)]
        expected = [p.chunk(world)[rank].clone() * world for p in parts]
        sums = c10d.reduce_scatter_tensor_coalesced(parts, "sum", world, name)
        c10d.wait_tensor(sums[0])
        for part in parts:
            part.fill_(-1)
        dist.barrier(group)
        for out, operand in zip(outs, operands, strict=True):
            assert out.view(world, -1)[:, [0, -1]].tolist() == [[10.0 * turn + r] * 2 for r in range(world)]
            assert out.numel() == world * operand.numel() and not (out == -1).any()
        assert all(map(torch.equal, sums, expected))
        for each in (*outs, *sums):
            c10d.wait_tensor(each)


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_one_wait_is_for_all(backend: str) -> None:
    for late in range(2):
        run_ranks(waited_for_once, 2, backend, late)
