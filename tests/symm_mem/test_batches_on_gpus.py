"""batch_put on GPUs, and transfers in compiled graphs: eager, captured, by SMs and by copy engines in one batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from opcommon import graph_of
from ranks import on_ranks
from weft import symm_mem

pytestmark = pytest.mark.gpu(2)

# Floats. More than one launch takes; no vectors; of several blocks; one for a copy engine, which is the last.
COUNTS = [*(3 + 29 * i for i in range(38)), 1 << 18, (1 << 20) + 5, 13 << 20]


def sent(rank: int, turn: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).mul_(0.5).add_(rank * 1000 + turn)


@on_ranks([2, 3], device="cuda")
def test_batches_on_gpus(rank: int, world_size: int) -> None:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    xs = symm_mem.register([torch.full((count,), float("nan")) for count in COUNTS])
    sources = [torch.empty(count) for count in COUNTS]

    def fill(turn: int) -> None:
        for source, count in zip(sources, COUNTS, strict=True):
            source.copy_(sent(rank, turn, count))

    def go() -> None:
        symm_mem.batch_signal([(x, left) for x in xs])
        symm_mem.batch_put([(x, source, right) for x, source in zip(xs, sources, strict=True)])
        symm_mem.batch_wait([(x, left) for x in xs])

    def check(turn: int) -> None:
        for x, count in zip(xs, COUNTS, strict=True):
            assert torch.equal(x.tensor, sent(left, turn, count)), (turn, count)

    for turn in range(3):
        fill(turn)
        go()
        check(turn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        go()
        go()
    for turn in range(3, 9):
        fill(turn)
        graph.replay() if turn % 2 else go()
        check(turn)
    both = [(x, source, peer) for x, source in zip(xs[:9], sources, strict=False) for peer in (left, right)]
    if left != right:
        symm_mem.batch_signal([(x, peer) for x in xs[:9] for peer in (left, right)])
        symm_mem.batch_put(both)
        for x in xs[:9]:
            x.wait(left)
            x.wait(right)
    symm_mem.check()


@on_ranks(2, device="cuda", fresh=True)
def test_a_batch_that_is_not_let_on_gpus(rank: int, world_size: int) -> None:
    """Of a batch one is let and one is not: the peer and the tensor are named, and nothing is written."""
    x, y = symm_mem.register([torch.zeros(5), torch.zeros(7)])
    other = 1 - rank
    symm_mem.set_timeout(1)
    if rank == 1:
        x.signal(0)
    else:
        symm_mem.batch_put([(x, torch.ones(5), 1), (y, torch.ones(7), 1)])
        torch.cuda.synchronize()
        with pytest.raises(symm_mem.PeerTimeout, match=r"registered tensor \d+, float32\[7\] on rank"):
            symm_mem.check()
    torch.distributed.barrier()
    assert not y.tensor.any()
    symm_mem.set_timeout(20)
    symm_mem.reset()
    symm_mem.batch_signal([(x, other), (y, other)])
    symm_mem.batch_put([(x, torch.ones(5), other), (y, torch.ones(7), other)])
    if rank == 0:
        symm_mem.set_timeout(1)
        symm_mem.batch_wait([(x, other), (y, other)])
        assert x.tensor.all() and y.tensor.all()
        symm_mem.batch_wait([(x, other), (y, other)])  # of which nobody knows
        torch.cuda.synchronize()
        with pytest.raises(
            symm_mem.PeerTimeout, match="the count of accesses by rank 1 for registered tensor"
        ):
            symm_mem.check()
    symm_mem.set_timeout(20)
    torch.distributed.barrier()
    symm_mem.reset()


@on_ranks(2, device="cuda")
def test_compiled_transfers_on_gpus(rank: int, world_size: int) -> None:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    x, y = symm_mem.register([torch.zeros(64, 48), torch.zeros(33)])

    def step(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        symm_mem.batch_signal([(x, left), (y, left)])
        symm_mem.batch_put([(x, a * 2, right), (y, a[0, :33], right)])
        symm_mem.batch_wait([(x, left), (y, left)])
        z = x.tensor + 1
        x.signal(left)
        x.put(a * 3, right)
        x.wait(left)
        return z, x.tensor[0, :33] + y.tensor

    made, a = torch.compile(step, fullgraph=True), torch.empty(64, 48)

    def check(turn: int, z: torch.Tensor, u: torch.Tensor) -> None:
        assert (z == 2.0 * (10 * turn + left) + 1).all()
        assert (u == 4.0 * (10 * turn + left)).all()

    for turn in range(3):
        check(turn, *made(a.fill_(10.0 * turn + rank)))
    graph, results = graph_of(partial(made, a))
    for turn in range(3, 8):
        a.fill_(10.0 * turn + rank)
        if turn % 2:
            graph.replay()
            check(turn, *results)
        else:
            check(turn, *made(a))
