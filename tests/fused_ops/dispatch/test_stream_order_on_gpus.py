"""Two streams of a GPU, nothing reserved: their calls take turns, and neither waits for more than that."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from opcommon import graph_of
from ranks import run_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, one_shot_all_reduce
from weft.fused_ops.dispatch.plan import forced
from weft.symm_mem.backends import cuda_state

pytestmark = pytest.mark.gpu

ROUNDS = 2000
CYCLES = 2_000_000  # of torch.cuda._sleep: a millisecond, or a little more


def buffer_of(world_size: int, number: int) -> dist.ProcessGroup:
    return dist.new_group(list(range(world_size)), group_desc=f"stream {number}")


def crowd(rank: int, world_size: int, how: str) -> None:
    """Products before all-reduces, gathers that take the whole GPU: each stream could keep off the other one's."""
    symm_mem.set_timeout(10)
    streams = [torch.cuda.Stream(), torch.cuda.Stream() if how == "captured" else torch.cuda.default_stream()]
    groups = [buffer_of(world_size, number) for number in range(2)]
    for group in groups:
        symm_mem.set_timeout(10, group)
    x, w = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    sums = torch.randn(2048, 1024).bfloat16()

    def call(what: int, group: dist.ProcessGroup) -> torch.Tensor:
        if what == 0:
            return one_shot_all_reduce(torch.mm(x, w), "sum", group)
        if what == 1:
            with forced("fused"):
                return fused_all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]
        if what == 2:
            with forced("fused"):
                return fused_matmul_reduce_scatter(torch.relu(x), w, "sum", 0, group)
        return one_shot_all_reduce(sums, "sum", group)

    want = [call(what, groups[0]) for what in range(4)]
    for stream, group in zip(streams, groups, strict=True):
        with torch.cuda.stream(stream):
            for what in range(4):
                assert torch.equal(call(what, group), want[what])
    torch.cuda.synchronize()
    dist.barrier()
    order = random.Random(world_size)  # the same on every rank
    wrong = torch.zeros((), dtype=torch.bool)

    graphs = []
    if how == "replayed":
        graphs = [graph_of(lambda what=what: call(what, groups[1]) != want[what]) for what in range(4)]

    def calls(count: int) -> None:
        for _ in range(count):
            number, what = order.randrange(2), order.randrange(4)
            with torch.cuda.stream(streams[number]):
                if graphs and order.random() < 0.5:
                    graph, differ = graphs[what]
                    graph.replay()
                    wrong.logical_or_(differ.any())
                    continue
                if how != "captured" and random.random() < 0.02:
                    torch.cuda._sleep(random.randrange(CYCLES))
                wrong.logical_or_((call(what, groups[number]) != want[what]).any())

    if how != "captured":
        calls(ROUNDS)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            begin, ends = torch.cuda.Event(), [torch.cuda.Event() for _ in streams]
            begin.record()
            for stream in streams:
                stream.wait_event(begin)
            calls(100)
            for stream, end in zip(streams, ends, strict=True):
                end.record(stream)
                end.wait()
        for _ in range(ROUNDS // 100):
            graph.replay()
    torch.cuda.synchronize()
    symm_mem.check()
    assert not wrong


@pytest.mark.parametrize("how", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_two_streams_do_not_keep_each_other_off_the_gpu(world_size: int, how: str) -> None:
    run_ranks(crowd, world_size, how, device="cuda")


def ordered(rank: int, world_size: int, default: int | None) -> tuple[float, float]:
    """When calls on two streams ended, in milliseconds: one after 10 sleeps, before 40 more, and the next."""
    both = [torch.cuda.default_stream() if default == i else torch.cuda.Stream() for i in range(2)]
    first, second = both
    x = torch.randn(1024)
    for stream in (first, second):
        with torch.cuda.stream(stream):
            one_shot_all_reduce(x, "sum", None)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin, a, b = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with torch.cuda.stream(first):
        begin.record()
        torch.cuda._sleep(10 * CYCLES)
        one_shot_all_reduce(x, "sum", None)
        a.record()
        torch.cuda._sleep(40 * CYCLES)
    with torch.cuda.stream(second):
        one_shot_all_reduce(x, "sum", None)
        b.record()
    torch.cuda.synchronize()
    symm_mem.check()
    return begin.elapsed_time(a), begin.elapsed_time(b)


@pytest.mark.gpu(own=True)  # what lies after a call runs beside the next one
@pytest.mark.parametrize("default", [None, 0, 1], ids=["none", "first", "second"])
def test_a_call_waits_for_the_last_call_and_not_for_what_lies_behind_it(default: int | None) -> None:
    """Whether one of the streams is the default one, or none."""
    for a, b in run_ranks(ordered, 2, default, device="cuda"):
        assert a > 8 and a <= b < 2 * a, (a, b)


@pytest.mark.gpu(1)
def test_streams_are_found_by_their_addresses() -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        assert cuda_state.state.stream(stream.cuda_stream, 0).cuda_stream == stream.cuda_stream
