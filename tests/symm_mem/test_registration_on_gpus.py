"""Registered tensors on GPUs: segments of each kind, strides, CUDA graphs, addresses that come back, faults."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.registration.table import UNUSED, UNUSED_BYTES

pytestmark = pytest.mark.gpu(2)

#: How the allocator makes its segments, and the kind of segment that is registered.
ALLOCATORS = {
    "plain": ({}, "ipc"),
    "expandable": ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "vmm"),
}
# Floats: by SMs, no multiple of a vector, by copy engines.
SIZES = (1, 3, 1000, 1 << 14, (1 << 20) + 5, 13 << 20)


def neighbours(rank: int, world_size: int) -> tuple[int, int]:
    return (rank + 1) % world_size, (rank - 1) % world_size


def pattern(rank: int, turn: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).mul_(0.5).add_(rank * 1000 + turn)


def moves(rank: int, world_size: int, kind: str) -> None:
    right, left = neighbours(rank, world_size)
    tensors = [torch.full((count,), float("nan")) for count in SIZES]
    registered = symm_mem.register(tensors)
    assert {x.of.keys[right][1][0] for x in registered} == {kind}
    for turn in range(4):
        for x, count in zip(registered, SIZES, strict=True):
            x.signal(left)
            x.put(pattern(rank, turn, count), right)
            x.wait(left)
            assert torch.equal(x.tensor, pattern(left, turn, count)), (turn, count)
            out = torch.full((count,), float("nan"))
            x.signal(left)
            assert torch.equal(x.get(out, right), pattern(rank, turn, count)), (turn, count)
            x.wait(left)
            x.tensor.fill_(float("nan"))
    for x, count in zip(registered, SIZES, strict=True):  # of one tensor some by SMs, some by copy engines
        for turn in range(6):
            whole = pattern(rank, turn, count + 1)
            x.signal(left)
            x.put(whole[turn % 2 :][:count], right)
            x.wait(left)
            assert torch.equal(x.tensor, pattern(left, turn, count + 1)[turn % 2 :][:count]), (turn, count)
    shifted = symm_mem.register([tensor[1:] for tensor in tensors if tensor.numel() > 1])
    assert symm_mem.stats(None, "cuda").registered == len(SIZES) + len(shifted)
    for x in shifted:  # no vectors: by copy engines
        x.signal(left)
        x.put(pattern(rank, 9, x.tensor.numel()), right)
        x.wait(left)
        assert torch.equal(x.tensor, pattern(left, 9, x.tensor.numel()))
    symm_mem.unregister([*registered, *shifted])
    symm_mem.check()


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_data_goes_both_ways_on_gpus(allocator: str) -> None:
    env, kind = ALLOCATORS[allocator]
    run_ranks(moves, 2, kind, device="cuda", env=env)


@on_ranks(2, device="cuda")
def test_memory_of_a_pool(rank: int, world_size: int) -> None:
    right, left = neighbours(rank, world_size)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        mine = torch.zeros(100_000)
    (x,) = symm_mem.register([mine])
    x.signal(left)
    x.put(pattern(rank, 0, 100_000), right)
    x.wait(left)
    assert torch.equal(mine, pattern(left, 0, 100_000))
    symm_mem.unregister([x])


@on_ranks(2, device="cuda")
def test_strides_and_the_heap_on_gpus(rank: int, world_size: int) -> None:
    right, left = neighbours(rank, world_size)
    wide = torch.zeros(300, 200)
    x, y = symm_mem.register([wide[::3, 5:105].t(), symm_mem.empty(40, 50, group=None).zero_()])
    for turn in range(3):
        sent = torch.randn(100, 100) + turn
        x.signal(left)
        x.put(sent, right)
        x.wait(left)
        y.signal(left)
        y.put(sent[:40, ::2], right)
        y.wait(left)
        told = torch.empty(100, 100)
        x.signal(left)
        x.get(told.t(), right)
        x.wait(left)
        assert torch.equal(told.t(), sent)
        assert torch.equal(y.tensor, x.tensor[:40, ::2])
    assert int((wide != 0).sum()) <= 100 * 100
    symm_mem.unregister([x, y])


@pytest.mark.parametrize("count", [1 << 10, 13 << 20])
@on_ranks(2, device="cuda")
def test_in_a_graph_between_eager_calls(rank: int, world_size: int, count: int) -> None:
    """Replays between eager calls: the counts live on the device."""
    right, left = neighbours(rank, world_size)
    source, out = torch.zeros(count), torch.zeros(count)
    held = symm_mem.register([torch.zeros(count)])
    number = held[0].number

    def exchange() -> None:
        (x,) = held
        x.signal(left)
        x.put(source, right)
        x.wait(left)
        out.copy_(x.tensor)

    source.fill_(rank)
    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            source.add_(world_size)
            exchange()
    sent = rank
    for turn in range(10):
        if turn % 3 == 1:
            source.add_(world_size)
            exchange()
            sent += world_size
        graph.replay()
        sent += 3 * world_size
        expected = sent - rank + left
        assert (out == expected).all(), (turn, out[0].item(), expected)
    torch.cuda.synchronize()
    symm_mem.check()
    with pytest.raises(symm_mem.WeftError, match=f"a captured CUDA graph uses registered tensor {number}"):
        symm_mem.unregister(held)
    graph.replay()
    torch.cuda.synchronize()
    del graph
    held.clear()
    for _ in range(50):
        symm_mem.register([torch.zeros(1)])
        if number not in get_heap().registrations.registry.entries:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("the graph is gone, its tensors are kept")


def reused(rank: int, world_size: int) -> None:
    """Segments that are freed, and others that come to lie at their addresses."""
    right, left = neighbours(rank, world_size)
    seen, names = [], set()
    for turn in range(6):
        mine = torch.full((16 << 20,), float(turn * 10 + rank))
        seen.append(mine.data_ptr())
        (x,) = symm_mem.register([mine])
        names.add(x.of.keys[rank])
        x.signal(left)
        out = x.get(torch.empty(16 << 20), right)
        assert (out == turn * 10 + right).all()
        x.wait(left)
        symm_mem.unregister([x])
        assert symm_mem.stats(None, "cuda").segments == 0
        del x, mine, out
        torch.cuda.empty_cache()
    assert len(set(seen)) < len(seen), "no address came back: this shows nothing"
    assert len(names) == 6


@on_ranks(2, device="cuda", env=ALLOCATORS["expandable"][0])
def test_unused_segments_stay_mapped(rank: int, world_size: int) -> None:
    """An expandable segment that nobody uses stays mapped, also where its owner has freed it; the cache is bounded."""
    right, left = neighbours(rank, world_size)
    sizes = (2 << 20, 1 << 18)  # of few chunks, so that all of two turns are kept
    for turn in range(2):
        tensors = [torch.full((count,), float(turn * 10 + rank)) for count in sizes]
        xs = symm_mem.register(tensors)
        where = [x.tensors[right].data_ptr() for x in xs]  # type: ignore[union-attr]
        for x, count in zip(xs, sizes, strict=True):
            x.signal(left)
            assert (x.get(torch.empty(count), right) == turn * 10 + right).all()
            x.wait(left)
        before = symm_mem.stats(None, "cuda")
        symm_mem.unregister(xs)
        kept = symm_mem.stats(None, "cuda")
        assert kept.registered == 0 and kept.segments == before.segments > 0
        again = symm_mem.register(tensors)
        assert [x.tensors[right].data_ptr() for x in again] == where  # type: ignore[union-attr]
        assert symm_mem.stats(None, "cuda").segments == before.segments
        symm_mem.unregister(again)
        del x, xs, again, tensors
        torch.cuda.empty_cache()  # the next ones are other memory
        stats = symm_mem.stats(None, "cuda")
        assert 0 < stats.segments <= UNUSED and 0 < stats.reserved <= UNUSED_BYTES
    large = torch.zeros((UNUSED_BYTES >> 2) + (1 << 20))
    symm_mem.unregister(symm_mem.register([large]))
    assert symm_mem.stats(None, "cuda").segments <= 1, "what is larger than the cache is not kept"


@pytest.mark.parametrize("allocator", ["plain"])
def test_an_address_that_comes_back_on_gpus(allocator: str) -> None:
    run_ranks(reused, 2, device="cuda", env=ALLOCATORS[allocator][0])


@on_ranks(2, device="cuda", fresh=True)
def test_a_put_without_a_signal_on_gpus(rank: int, world_size: int) -> None:
    """A put that is not let: nothing is written, and the error names what was missing."""
    (x,) = symm_mem.register([torch.zeros(1000)])
    symm_mem.set_timeout(1.0)
    if rank == 0:
        x.put(torch.ones(1000), 1)
        torch.cuda.synchronize()
        with pytest.raises(symm_mem.PeerTimeout) as caught:
            symm_mem.check()
        said = caught.value
        assert (said.op, said.peer, said.expected, said.seen) == ("put", 1, 1, 0)
        assert "the count of signals by rank 1 for registered tensor 1" in str(said)
    else:
        time.sleep(2.5)
        assert not x.tensor.any()
    symm_mem.set_timeout(20)
    symm_mem.reset()
    right, left = neighbours(rank, world_size)
    x.signal(left)
    x.put(torch.full((1000,), rank + 1.0), right)
    x.wait(left)
    assert (x.tensor == left + 1).all()


@on_ranks(2, device="cuda", fresh=True)
def test_a_wait_for_nothing_on_gpus(rank: int, world_size: int) -> None:
    """A wait for a put that never comes."""
    (x,) = symm_mem.register([torch.zeros(10)])
    symm_mem.set_timeout(1.0)
    if rank == 0:
        x.signal(1)
        x.wait(1)
        torch.cuda.synchronize()
        with pytest.raises(symm_mem.PeerTimeout, match=r"wait: .* the count of accesses by rank 1"):
            x.signal(1)
    else:
        time.sleep(2.0)
    symm_mem.set_timeout(60.0)  # the ranks come here one after the other
    symm_mem.reset()


def refused(rank: int, world_size: int) -> None:
    with pytest.raises(symm_mem.WeftError, match="rank 0: RuntimeError: memory of cudaMallocAsync"):
        symm_mem.register([torch.zeros(100)])
    (x,) = symm_mem.register([symm_mem.empty(4)])
    symm_mem.unregister([x])


def test_memory_that_cannot_be_a_peers_is_refused() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    run_ranks(refused, 2, device="cuda", env=env, fresh=True)


@on_ranks(2, device="cuda")
def test_a_hit_asks_nobody_on_gpus(rank: int, world_size: int) -> dict[str, Any]:
    (x,) = symm_mem.register([torch.zeros(4)])
    steps = get_heap().rendezvous._step
    for _ in range(100):
        assert symm_mem.register([x.tensor])[0] is x
    assert get_heap().rendezvous._step == steps
    return {}
