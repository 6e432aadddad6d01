"""A Triton kernel of a user's own writes to a peer's tensor and signals it, by the addresses that Peers gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torchrun import run_program
from weft import symm_mem

EXAMPLES = Path(__file__).parents[2] / "examples"


def ring(rank: int, world_size: int, tries: int) -> None:
    sys.path.insert(0, str(EXAMPLES))
    from own_kernel import TURNS, N, push_to_next

    peers = symm_mem.rendezvous(symm_mem.empty(N).fill_(float("nan")))
    left, mine = (rank - 1) % world_size, peers.tensors[rank]
    assert peers.signal_table.device == mine.device and peers.signal_table.shape == (world_size,)
    peers.barrier()

    def value(of: int, count: int) -> torch.Tensor:
        return torch.arange(N, dtype=torch.float32) + 1000 * of + 100 * count

    for count in range(1, TURNS + 1):
        assert push_to_next(value(rank, count), peers, count, tries)
        assert torch.equal(mine, value(left, count))
        peers.barrier()  # everybody has read; this counts in other words than the kernel's
    # The next rank does not come: the kernel ends its wait.
    if rank == 0:
        assert not push_to_next(value(rank, 0), peers, TURNS + 1, 10)
    peers.barrier()
    symm_mem.reset()
    peers.barrier()
    assert push_to_next(value(rank, 1), peers, 1, tries), "the words are 0 again"
    peers.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_between_cpu_ranks_in_the_interpreter(world_size: int) -> None:
    run_ranks(ring, world_size, 100_000, env={"TRITON_INTERPRET": "1"}, fresh=True)


@pytest.mark.gpu(2)
def test_on_gpus() -> None:
    run_ranks(ring, 2, 10_000_000, device="cuda")


def test_the_example_runs() -> None:
    done = run_program(EXAMPLES / "own_kernel.py", 2)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
