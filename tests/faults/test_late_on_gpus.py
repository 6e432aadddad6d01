"""A rank that comes after the others have given up on it, on GPUs: it computes right numbers, or it is told."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, last_plan, one_shot_all_reduce
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.all_gather_matmul import copied_products

pytestmark = pytest.mark.gpu

DEADLINE = 0.5
CULPRIT = 1


def told() -> str | None:
    """What waits of this rank have run into, when its work is done."""
    torch.cuda.synchronize()
    try:
        symm_mem.check()
    except symm_mem.PeerTimeout as e:
        return str(e)
    return None


def late_in_a_graph(rank: int, world_size: int, numel: int) -> tuple[list[bool], str | None]:
    """All-reduces of each other's results: what the others make without the late rank must not reach it."""
    x = torch.full((numel,), 1.0 + rank)
    calls = 4
    symm_mem.set_timeout(60)
    one_shot_all_reduce(x, "sum", None)
    torch.cuda.synchronize()
    dist.barrier()
    symm_mem.set_timeout(DEADLINE)
    graph, outs = torch.cuda.CUDAGraph(), [x]
    with torch.cuda.graph(graph):
        for _ in range(calls):
            outs.append(one_shot_all_reduce(outs[-1], "sum", None))
    symm_mem.set_timeout(60)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    for out in outs[1:]:
        out.zero_()
    torch.cuda.synchronize()
    time.sleep(3 * DEADLINE * (rank == CULPRIT))
    for _ in range(3):  # as many as a program enqueues before it looks
        graph.replay()
    heard = told()
    total = world_size * (world_size + 1) / 2
    right = [bool((out == total * world_size**i).all()) for i, out in enumerate(outs[1:])]
    dist.barrier()
    symm_mem.reset()
    graph.replay()
    assert told() is None and (outs[-1] == total * world_size ** (calls - 1)).all()
    return right, heard


@pytest.mark.parametrize("numel", [1000, 200_000])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_a_late_rank_gets_right_numbers_or_is_told(world_size: int, numel: int) -> None:
    for right, heard in run_ranks(late_in_a_graph, world_size, numel, device="cuda"):
        assert all(right) or heard is not None, right
        assert heard is None or heard.startswith("one_shot_all_reduce: "), heard


def copies_come_late(rank: int, world_size: int) -> tuple[bool, str | None]:
    """Rank 1 has sent its rows and stands still; rank 0 gives up on it, and copies what it had enqueued already."""
    symm_mem.set_timeout(60)
    b = torch.eye(256)
    rows = [[torch.full((128, 256), 10.0 * call + r) for r in range(world_size)] for call in range(5)]

    def call(n: int) -> torch.Tensor:
        with forced("fused"):
            return fused_all_gather_matmul(rows[n][rank], [b], 0, None, return_A=False)[1][0]

    for n in range(2):  # float32, so that copy engines send; each buffer once
        assert torch.equal(call(n), torch.cat(rows[n]))
        assert last_plan().algorithm == "copy_engine"
    torch.cuda.synchronize()
    dist.barrier()
    symm_mem.set_timeout(DEADLINE)
    multiply = copied_products._multiply

    def multiply_late(*args: Any) -> None:
        torch.cuda._sleep(int(4 * DEADLINE * 1.9e9))
        multiply(*args)

    if rank == CULPRIT:
        with mock.patch.object(copied_products, "_multiply", multiply_late):
            out = call(2)
    else:
        out, *_ = [call(n) for n in (2, 3, 4)]
    heard = told()
    right = torch.equal(out, torch.cat(rows[2]))
    symm_mem.set_timeout(60)
    dist.barrier()
    symm_mem.reset()
    assert torch.equal(call(0), torch.cat(rows[0]))
    assert told() is None
    return right, heard


def test_copies_that_nobody_could_call_off_are_noticed() -> None:
    (right, heard), (late_right, late_heard) = run_ranks(copies_come_late, 2, device="cuda")
    assert right and heard is not None and "waited 0.5 s for rank 1" in heard, heard
    assert late_heard is not None and "for rank 0: abort notice of rank 0 is" in late_heard, (
        late_right,
        late_heard,
    )
