"""Faults on GPUs: waits inside kernels end, and say for whom; a reset brings streams and captured graphs back.

The tests share their ranks, whom it takes longer to start than the tests to run: each leaves them as it found them.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults.cases import STRIKES_AT, Seen, expect_whole, kills, other_group, story, strikes
from faults.inject import Fault
from faults.ops import OPS
from opcommon import graph_of
from ranks import on_ranks, run_ranks
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.placement import first_gap
from weft.symm_mem.heap.registry import get_heap

pytestmark = pytest.mark.gpu

DEADLINE = 0.5
SLOW = 3.0
CULPRIT = 1

FAULTS = [
    Fault("delay", CULPRIT, STRIKES_AT, seconds=3 * DEADLINE),
    Fault("skip", CULPRIT, STRIKES_AT),
    Fault("corrupt", CULPRIT, STRIKES_AT),
]


def expect_timeout(op: str, seen: Seen, told: str) -> None:
    error = seen.error
    assert error is not None and error["kind"] == "PeerTimeout" and error["op"] == op, told
    assert error["peer"] == CULPRIT or error["culprit"] == CULPRIT, told
    assert re.search(r"faults/\w*ops\.py:\d+$", error["site"]), error
    assert seen.seconds < DEADLINE + SLOW, told
    assert seen.again == error["text"]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
@pytest.mark.parametrize("op", OPS)
def test_faults_that_a_group_survives(op: str, world_size: int) -> None:
    by_rank = run_ranks(strikes, world_size, op, FAULTS, DEADLINE, device="cuda")
    for i, fault in enumerate(FAULTS):
        seen = [rank[i] for rank in by_rank]
        told = f"{fault}\n{story(seen)}"
        expect_whole(seen)
        for rank, s in enumerate(seen):
            if fault.kind != "delay":
                assert s.error is not None and s.error["kind"] == "RankMismatch", told
                assert s.error["rank"] == CULPRIT and s.error["text"].count(f"{op}(") == 2, told
            elif rank == 0:
                expect_timeout(op, s, told)


def graph_survives(rank: int, world_size: int) -> str | None:
    up, down = torch.randn(1024, 512).bfloat16().t(), torch.randn(512, 1024).bfloat16().t()
    x = torch.randn(256, 512).bfloat16()
    group = dist.group.WORLD

    def layer() -> torch.Tensor:
        with forced("fused"):
            _, (h,) = fused_ops.fused_all_gather_matmul(x, [up], 0, group, return_A=False)
            return fused_ops.one_shot_all_reduce(
                fused_ops.fused_matmul_reduce_scatter(h, down, "sum", 0, group), "avg", group
            )

    layer()
    beside = torch.ones(1000)
    symm_mem.set_timeout(DEADLINE)  # a graph keeps the deadline that it was captured with
    torch.cuda.synchronize()
    dist.barrier()
    graph, out = graph_of(layer)
    symm_mem.set_timeout(60)

    def right() -> None:
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, layer())

    for _ in range(5):
        right()
    torch.cuda.synchronize()
    dist.barrier()
    text = None
    if rank == 0:  # the others leave a replay out
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 3 * DEADLINE + SLOW
        with pytest.raises(symm_mem.PeerTimeout) as error:
            symm_mem.check()
        text = str(error.value)
        with pytest.raises(symm_mem.PeerTimeout):
            symm_mem.check()
    # Another group of the same ranks goes on meanwhile.
    assert (fused_ops.one_shot_all_reduce(beside, "sum", other_group()) == world_size).all()
    symm_mem.reset()
    symm_mem.check()
    for _ in range(5):
        right()
    torch.cuda.synchronize()
    symm_mem.check()
    return text


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_a_captured_graph_works_again_after_a_reset(world_size: int) -> None:
    text = run_ranks(graph_survives, world_size, device="cuda")[0]
    assert re.search(r" \(called at .*tests/faults/test_faults_on_gpus\.py:\d+\); it is late", text), text
    assert text.startswith("fused_all_gather_matmul: rank 0 of group '0' waited"), text


@on_ranks(2, device="cuda")
def test_compiling_does_not_count_against_the_deadline(rank: int, world_size: int) -> None:
    """One rank takes three deadlines for each kernel that is made."""
    symm_mem.set_timeout(60)
    get_heap(None, "cuda")
    symm_mem.reset()  # whatever earlier calls have made is made again
    prepare, made = Heap.prepare, []

    def slow_prepare(heap: Heap, what: str, key: Any, step: Callable[[], Any]) -> None:
        def slowly() -> None:
            made.append(what)
            time.sleep(3 * DEADLINE * (rank == CULPRIT))
            step()

        prepare(heap, what, key, slowly)

    symm_mem.set_timeout(DEADLINE)
    with mock.patch.object(Heap, "prepare", slow_prepare):
        for op, make in OPS.items():
            case = make(rank, world_size, 0, 64, None, 0)
            dist.barrier()
            with forced("fused"):
                got = case.call()
            torch.cuda.synchronize()
            symm_mem.check()
            assert torch.equal(got, case.want()), op
    # One kernel is for both: what is overwritten is not compiled. Triton's and those of experts are made by each rank.
    own = ("fused_linear_cross_entropy", "fused_linear_log_probs", "cross_entropy_of_sharded_logits")
    others = {"one_shot_all_reduce_", "fused_all_gather_grouped_matmul", *own}
    assert list(dict.fromkeys(made)) == [op for op in OPS if op not in others], made
    symm_mem.set_timeout(60)


def signals_expire(rank: int, world_size: int) -> str | None:
    symm_mem.set_timeout(60)
    peers = symm_mem.rendezvous(symm_mem.empty(64))
    peers.barrier()
    torch.cuda.synchronize()
    dist.barrier()
    text = None
    if rank == 0:
        symm_mem.set_timeout(DEADLINE)
        begin = time.monotonic()
        peers.wait(1)
        torch.cuda.synchronize()  # the stream goes on
        assert time.monotonic() - begin < DEADLINE + SLOW
        with pytest.raises(symm_mem.PeerTimeout) as error:
            symm_mem.check()
        with pytest.raises(symm_mem.PeerTimeout, match=re.escape(str(error.value))):
            peers.put(1)
        text = str(error.value)
        symm_mem.set_timeout(60)
    symm_mem.reset()
    for turn in range(20):
        peers.tensors[rank].fill_(turn)
        peers.barrier()
        assert all((t == turn).all() for t in peers.tensors)
        peers.barrier()
    torch.cuda.synchronize()
    return text


def test_signals_work_again_after_a_reset() -> None:
    text = run_ranks(signals_expire, 2, device="cuda")[0]
    assert text.startswith("wait: rank 0 of group '0' waited 0.5 s for rank 1: channel 0 is 1, expected 2")
    assert re.search(r"tests/faults/test_faults_on_gpus\.py:\d+\)$", text), text


@on_ranks(2, device="cuda")
def test_growth_during_a_capture_works_or_is_refused(rank: int, world_size: int) -> None:
    """A graph's workspace is made while it is captured. If a rank cannot, no rank has captured that call."""
    gc.collect()  # of an earlier test: a graph that is destroyed during a capture ends it
    heap = get_heap(None, "cuda")
    x = torch.ones(1 << 22)
    fused_ops.one_shot_all_reduce(x[:100], "sum", None)
    torch.cuda.synchronize()
    filler = symm_mem.empty(heap.capacity, dtype=torch.uint8)  # so that the workspace needs another chunk
    create = heap.backend.create

    def full(size: int) -> None:
        raise MemoryError("no memory is left")

    def capture() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with forced("fused"), torch.cuda.graph(graph):
            out = fused_ops.one_shot_all_reduce(x, "sum", None)
        return graph, out

    while True:  # until nothing of the heap is free
        before = heap.capacity
        filler = (filler, symm_mem.empty(1 << 20, dtype=torch.uint8))
        if heap.capacity > before:
            break
    tail = heap.capacity - first_gap(heap._blocks.values(), heap.span)
    filler = (filler, symm_mem.empty(tail - (1 << 20), dtype=torch.uint8))
    before = heap.capacity
    heap.backend.create = full if rank == CULPRIT else create
    with pytest.raises(symm_mem.WeftError, match="rank 1: MemoryError: no memory is left"):
        capture()
    assert heap.capacity == before
    heap.backend.create = create
    graph, out = capture()
    assert heap.capacity > before
    for turn in range(3):
        x.fill_(turn + rank)
        graph.replay()
        assert (out == world_size * turn + sum(range(world_size))).all()
    del filler


@on_ranks(2, device="cuda")
def test_captures_work_on_every_stream_of_torchs_pool(rank: int, world_size: int) -> None:
    """Torch hands its streams out more than once. What is zeroed during a capture must not lie on the captured one."""
    gc.collect()  # of an earlier test: a graph that is destroyed during a capture ends it
    x = torch.full((64,), float(rank))
    for stream in [torch.cuda.Stream() for _ in range(33)]:
        graph = torch.cuda.CUDAGraph()
        with forced("fused"), torch.cuda.graph(graph, stream=stream):
            out = fused_ops.one_shot_all_reduce(x, "sum", None)
        graph.replay()
        assert (out == sum(range(world_size))).all()


@on_ranks(2, device="cuda", fresh=True)
def test_the_first_call_of_a_group_may_be_captured(rank: int, world_size: int) -> None:
    x, graph = torch.full((64,), float(rank)), torch.cuda.CUDAGraph()
    with forced("fused"), torch.cuda.graph(graph):
        out = fused_ops.one_shot_all_reduce(x, "sum", None)
        assert fused_ops.last_plan().algorithm != "unfused", fused_ops.last_plan()
    graph.replay()
    assert (out == sum(range(world_size))).all()


def test_a_killed_rank_is_named_within_the_deadline() -> None:
    of_rank_0 = run_ranks(kills, 2, CULPRIT, DEADLINE, device="cuda", expect_dead=(CULPRIT,))[0]
    for op, seen in zip(OPS, of_rank_0, strict=True):
        expect_timeout(op, seen, story([seen]))
