"""A Triton kernel of a user's own writes to a peer's tensor and signals it, by the addresses that Peers gives."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ranks import run_ranks
from weft import symm_mem

N, TURNS = 64, 5


@triton.jit
def push_and_wait(
    x,
    tensors,
    signals,
    count,
    late,
    RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    TRIES: tl.constexpr,
):
    i = tl.arange(0, N)
    tl.store(tl.load(tensors + RIGHT).to(tl.pointer_type(tl.float32)) + i, tl.load(x + i))
    tl.debug_barrier()
    word = tl.load(signals + RIGHT).to(tl.pointer_type(tl.int32)) + RANK
    tl.atomic_xchg(word, count, sem="release", scope="sys")
    word = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + LEFT
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    tries = 0
    while (seen - count < 0) & (tries < TRIES):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        tries += 1
    tl.store(late, (seen - count < 0).to(tl.int32))


def ring(rank: int, world_size: int, tries: int) -> None:
    peers = symm_mem.rendezvous(symm_mem.empty(N).fill_(float("nan")))
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine, late = peers.tensors[rank], torch.full((1,), 7, dtype=torch.int32)
    assert peers.signal_table.device == mine.device and peers.signal_table.shape == (world_size,)
    peers.barrier()

    def push(count: int, tries: int) -> int:
        x = torch.arange(N, dtype=torch.float32) + 1000 * rank + 100 * count
        args = x, peers.table, peers.signal_table, count, late
        push_and_wait[(1,)](*args, RIGHT=right, LEFT=left, RANK=rank, N=N, TRIES=tries)
        return int(late.item())

    for count in range(1, TURNS + 1):
        assert push(count, tries) == 0
        wanted = torch.arange(N, dtype=torch.float32) + 1000 * left + 100 * count
        assert torch.equal(mine, wanted)
        peers.barrier()  # read; the host's own words count on beside the kernel's
    # A peer that does not come: the kernel's bound ends the wait.
    if rank == 0:
        assert push(TURNS + 1, 10) == 1
    peers.barrier()
    symm_mem.reset()
    peers.barrier()
    assert push(1, tries) == 0, "the words begin at 0 again"
    peers.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_between_cpu_ranks_in_the_interpreter(world_size: int) -> None:
    run_ranks(ring, world_size, 100_000, env={"TRITON_INTERPRET": "1"}, fresh=True)


@pytest.mark.gpu(2)
def test_on_gpus() -> None:
    run_ranks(ring, 2, 10_000_000, device="cuda")
