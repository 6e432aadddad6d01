"""What follows an expired wait in a stream or a graph sends nothing, whatever workspace it uses: no wrong numbers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from faults.cases import other_group
from faults.ops import numbers
from opcommon import graph_of
from ranks import run_ranks
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced

pytestmark = pytest.mark.gpu

DEADLINE = 1.0  # of rank 0; the others have more patience
VOTE_DEADLINE = 5.0
CULPRIT = 1
K = N = 512
ROWS = 128


def operand(op: str, step: int, rank: int, size: int) -> torch.Tensor:
    dtype = torch.float32 if op == "gather by copy engines" else torch.bfloat16
    rows = ROWS * size if op == "scatter" else ROWS
    return numbers(100 * step + rank, rows, K).to(dtype)


def weight(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return numbers(1000 + rank, K, N).to(dtype)


def wanted(op: str, step: int, size: int) -> torch.Tensor:
    """The all-reduce's result, in float64: products of small whole numbers, whose sums are exact."""
    xs = [operand(op, step, r, size).double() for r in range(size)]
    ws = [weight(r, torch.float64) for r in range(size)]
    if op == "reduce":
        return size * sum(x @ w for x, w in zip(xs, ws, strict=True))
    if op == "scatter":
        return sum(sum(x @ w for x, w in zip(xs, ws, strict=True)).chunk(size))
    return torch.cat(xs) @ sum(ws)


def product_then_all_reduce(
    rank: int, size: int, op: str, captured: bool
) -> tuple[bool, bool, str | None, float]:
    """Rank 1 comes late to a product whose result is reduced at once; rank 0 has given up on it by then."""
    symm_mem.set_timeout(60)
    x = operand(op, 0, rank, size)
    w = weight(rank, x.dtype)

    def call() -> torch.Tensor:
        with forced("fused"):
            if op == "scatter":
                h = fused_ops.fused_matmul_reduce_scatter(x, w, "sum", 0, None)
            elif op == "reduce":
                h = fused_ops.fused_matmul_all_reduce(x, w, "sum", None)
            else:
                h = fused_ops.fused_all_gather_matmul(x, [w], 0, None, return_A=False)[1][0]
            return fused_ops.one_shot_all_reduce(h, "sum", None)

    def right(out: torch.Tensor, step: int) -> bool:
        return torch.equal(out.double(), wanted(op, step, size).to(out.dtype).double())

    for step in range(2):  # both buffers are used: what is stale there is of another step
        x.copy_(operand(op, step, rank, size))
        assert right(call(), step)
    torch.cuda.synchronize()
    dist.barrier()
    run: Callable[[], torch.Tensor] = call
    if captured:
        symm_mem.set_timeout(DEADLINE if rank == 0 else VOTE_DEADLINE)
        graph, out = graph_of(call)

        def run() -> torch.Tensor:
            out.fill_(float("nan"))
            graph.replay()
            return out

        symm_mem.set_timeout(60)
        for step in range(2):
            x.copy_(operand(op, step, rank, size))
            assert right(run(), step)
    x.copy_(operand(op, 2, rank, size))
    torch.cuda.synchronize()
    dist.barrier()
    symm_mem.set_timeout(DEADLINE if rank == 0 else VOTE_DEADLINE)
    if rank == CULPRIT:
        time.sleep(3 * DEADLINE)
    begin = time.monotonic()
    result = run()
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    heard = None
    try:
        symm_mem.check()
    except symm_mem.PeerTimeout as e:
        heard = str(e)
    found = right(result, 2)
    symm_mem.set_timeout(60)
    beside = fused_ops.one_shot_all_reduce(torch.ones(1000), "sum", other_group())
    others_go_on = bool((beside == size).all())
    dist.barrier()
    symm_mem.reset()
    x.copy_(operand(op, 3, rank, size))
    assert right(run(), 3)
    torch.cuda.synchronize()
    symm_mem.check()
    return found, others_go_on, heard, seconds


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("op", ["gather", "scatter", "reduce", "gather by copy engines"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_what_a_matmul_has_lost_reaches_no_peer(world_size: int, op: str, captured: bool) -> None:
    by_rank = run_ranks(product_then_all_reduce, world_size, op, captured, device="cuda")
    others = {"scatter": "fused_matmul_reduce_scatter", "reduce": "fused_matmul_all_reduce"}
    product = others.get(op, "fused_all_gather_matmul")
    # Who comes late misses the sums of a rank that has given up in the product itself.
    missed_in = product if op == "reduce" else "one_shot_all_reduce"
    for rank, (right, others_go_on, heard, seconds) in enumerate(by_rank):
        assert others_go_on
        assert right or heard is not None, f"rank {rank} has wrong numbers and was not told"
        if rank == 0:
            assert heard is not None and heard.startswith(f"{product}: rank 0 of group '0' waited 1 s"), heard
            assert f"for rank {CULPRIT}: " in heard, heard
            assert seconds < 1.8 * DEADLINE, "one deadline for all that follows"
        else:
            assert heard is not None and heard.startswith(f"{missed_in}: rank {rank} of group"), heard
            assert "for rank 0: " in heard, heard


def signals_then_all_reduce(rank: int, size: int) -> str | None:
    """Rank 0's stream waits in vain for a signal; what it would reduce next was to come with that."""
    symm_mem.set_timeout(60)
    peers = symm_mem.rendezvous(symm_mem.empty(1000))
    mine = peers.tensors[rank].fill_(1.0 + rank)
    assert (fused_ops.one_shot_all_reduce(mine, "sum", None) == size * (size + 1) / 2).all()
    torch.cuda.synchronize()
    dist.barrier()
    symm_mem.set_timeout(DEADLINE if rank == 0 else VOTE_DEADLINE)
    if rank == 0:
        peers.wait(1)
    fused_ops.one_shot_all_reduce(mine, "sum", None)
    torch.cuda.synchronize()
    with pytest.raises(symm_mem.PeerTimeout) as error:
        symm_mem.check()
    symm_mem.set_timeout(60)
    dist.barrier()
    symm_mem.reset()
    assert (fused_ops.one_shot_all_reduce(mine, "sum", None) == size * (size + 1) / 2).all()
    torch.cuda.synchronize()
    symm_mem.check()
    return str(error.value)


def test_what_comes_behind_a_signal_that_did_not_come_reaches_no_peer() -> None:
    waited, missed = run_ranks(signals_then_all_reduce, 2, device="cuda")
    assert waited.startswith("wait: rank 0 of group '0' waited 1 s for rank 1: channel 0 is 0, expected 1")
    assert missed.startswith("one_shot_all_reduce: rank 1 of group '0' waited 5 s for rank 0: "), missed
