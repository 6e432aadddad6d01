"""Calls of the process group "weft" on CUDA without a GPU: what is launched, on which stream, after what."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist
from fake_gpu import NAME, SIDE, STREAM, Event, Stage
from weft import symm_mem
from weft.fused_ops.dispatch import all_reduces, plan
from weft.fused_ops.dispatch.call_lines import CallLine
from weft.fused_ops.dispatch.choice import unfused
from weft.fused_ops.dispatch.launch_cache import PreparedKernel
from weft.fused_ops.process_groups import cuda_calls
from weft.fused_ops.process_groups.calls import ALL_GATHER, ALL_REDUCE, GroupCall
from weft.fused_ops.process_groups.cuda_calls import DeviceLines
from weft.fused_ops.process_groups.group import WeftProcessGroup
from weft.fused_ops.process_groups.work import StreamWork
from weft.symm_mem import flight_recorder
from weft.symm_mem.heap.registry import register_heap

gpu_stage = fake_gpu.stage
OTHER, DEFAULT = 8, fake_gpu.DEADLINE


class GroupStage(Stage):
    """The kernels of a group's calls, and how often they were made ready."""

    lines: DeviceLines
    launches: list[tuple[int, int, int, int]]
    prepared: int


@pytest.fixture
def stage(gpu_stage: GroupStage, monkeypatch: pytest.MonkeyPatch) -> GroupStage:
    stage = gpu_stage
    stage.lines, stage.launches, stage.prepared = DeviceLines(stage.group, NAME), [], 0
    heap: Any = stage.where
    heap.fault, heap.rank = None, 0
    heap.call_check = SimpleNamespace(compared={ALL_REDUCE, ALL_GATHER}, compare=lambda *_, **__: None)
    heap.make_once = lambda part, *_: getattr(heap, part)
    register_heap(stage.group, "cpu", -1, heap)

    def launch(buffer: int, operands: Any, results: Any, timeout_ns: int, stream: int) -> None:
        stage.launches.append((*operands, *results, timeout_ns, stream))
        stage.gpu.on.setdefault(stream, []).append("kernel")

    def prepared(_: Any, call: GroupCall, x: torch.Tensor, *others: Any) -> Any:
        choice = all_reduces.choose_sum_on_cuda(x, "sum", stage.group)
        if call.name == ALL_REDUCE and choice.is_unfused:
            return choice.reason
        stage.prepared += 1
        kernel = SimpleNamespace(launch=launch, grids=())
        return PreparedKernel(stage.workspace, kernel, plan.Plan("push"))  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_calls, "_kernel_of", prepared)
    return stage


def all_reduce(x: torch.Tensor) -> GroupCall:
    return GroupCall(ALL_REDUCE, x, x, "sum")


def run(stage: GroupStage, *calls: GroupCall) -> None:
    work = stage.lines.run(list(calls), asynchronous=False)
    assert not isinstance(work, str) and work.wait()


def test_a_call_like_one_before_is_launched_at_once(stage: GroupStage) -> None:
    x, y = torch.randn(5, 3), torch.randn(15)
    for tensor in (x, y, x):
        run(stage, all_reduce(tensor))
    assert stage.prepared == 1
    assert stage.launches == [(t.data_ptr(), t.data_ptr(), DEFAULT, STREAM) for t in (x, y, x)]
    assert x._version == 0 and stage.workspace.noted == [ALL_REDUCE] * 3
    assert plan.last_plan().algorithm == "push"
    symm_mem.set_timeout(0.5, NAME)
    run(stage, all_reduce(x))
    assert stage.launches[-1][2] == 500_000_000


def test_in_the_flight_recorder(stage: GroupStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "calls", calls := deque[Any]())
    x = torch.randn(5, 3)
    for _ in range(4):
        run(stage, all_reduce(x))
    first, *_, before, last = calls  # a deadline that another test has set is dropped with the first one
    shape = (flight_recorder.REDUCE, (15,), torch.float32, "cuda")
    assert (first.op, first.group, first.shape[:3]) == (ALL_REDUCE, NAME, shape[:3])
    assert before[:3] == last[:3] == (ALL_REDUCE, NAME, shape)
    assert (before[4] - first.sequence, last[4] - first.sequence) == (2, 3)


def test_a_call_with_a_deadline_of_its_own(stage: GroupStage) -> None:
    x = torch.randn(4)
    run(stage, all_reduce(x))
    stage.lines.run([all_reduce(x)], asynchronous=False, seconds=1.5)
    run(stage, all_reduce(x))
    assert [launch[2] for launch in stage.launches] == [DEFAULT, 1_500_000_000, DEFAULT]
    assert [getattr(name, "seconds", None) for name in stage.workspace.noted] == [None, 1.5, None]


@pytest.mark.parametrize("why", ["capturing", "size", "dtype", "op", "checked", "external"])
def test_what_is_made_ready_anew(stage: GroupStage, why: str) -> None:
    x = torch.randn(6)
    run(stage, all_reduce(x))
    call = all_reduce(x)
    if why == "capturing":
        stage.gpu.graphs[STREAM] = ("ACTIVE", 77)
    elif why == "size":
        call = all_reduce(x[:4])
    elif why == "dtype":
        call = all_reduce(x.half())
    elif why == "op":
        call = GroupCall(ALL_REDUCE, x, x, "max")
    elif why == "external":  # its handle may be another stream's when it is destroyed
        stage.gpu.now, stage.gpu.external[OTHER] = OTHER, 5
    elif why == "checked":
        symm_mem.set_checked(True)
    try:
        run(stage, call)
        if why in ("capturing", "checked", "external"):
            run(stage, call)
    finally:
        symm_mem.set_checked(False)
    assert stage.prepared == len(stage.launches) >= 2


def test_one_call_runs_behind_the_other_on_whatever_stream(stage: GroupStage) -> None:
    x = torch.randn(4)
    run(stage, all_reduce(x))
    stage.gpu.now = OTHER
    run(stage, all_reduce(x))
    run(stage, all_reduce(x))
    assert ("wait", "kernel") in stage.gpu.on[OTHER]
    assert stage.gpu.on[OTHER].index(("wait", "kernel")) < stage.gpu.on[OTHER].index("kernel")
    assert stage.gpu.on[STREAM] == ["kernel"]
    for waits in (1, 2):
        stage.gpu.now = 9
        for _ in range(2):  # what the group's own backend does from here
            stage.lines.order_after(torch.device("cuda", 0))
        assert stage.gpu.on[9].count(("wait", "kernel")) == waits
        stage.gpu.now = OTHER
        run(stage, all_reduce(x))


def test_the_groups_own_backend_comes_after_calls_of_other_threads(
    stage: GroupStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, wait = torch.randn(4), CallLine.wait
    run(stage, all_reduce(x))

    def another_call_meanwhile(line: CallLine, stream: int) -> None:
        wait(line, stream)
        if stage.gpu.now == 9:
            stage.gpu.now = OTHER
            run(stage, all_reduce(x))
            stage.gpu.now = 9

    stage.gpu.now = 9
    with monkeypatch.context() as patched:
        patched.setattr(CallLine, "wait", another_call_meanwhile)
        stage.lines.order_after(torch.device("cuda", 0))
    before = stage.gpu.on[9].count(("wait", "kernel"))
    stage.lines.order_after(torch.device("cuda", 0))
    assert stage.gpu.on[9].count(("wait", "kernel")) == before + 1


def test_calls_in_a_graph_have_a_line_of_their_own(stage: GroupStage) -> None:
    x = torch.randn(4)
    run(stage, all_reduce(x))
    stage.gpu.now, stage.gpu.graphs[OTHER] = OTHER, ("ACTIVE", 77)
    run(stage, all_reduce(x))
    assert stage.gpu.on[OTHER] == ["replays wait", "kernel"], "a wait in the capture itself would end it"


def test_a_part_of_the_result_may_be_what_is_gathered(stage: GroupStage) -> None:
    whole = torch.zeros(8)
    own, others = whole[:4], whole[2:6]
    for _ in range(2):
        run(stage, GroupCall(ALL_GATHER, whole, own))
        run(stage, GroupCall(ALL_GATHER, whole, others))
    addresses = [x for x, *_ in stage.launches]
    assert addresses[0] == addresses[2] == own.data_ptr()
    assert others.data_ptr() not in addresses, "it would be overwritten before it is read"


def test_a_launch_that_fails_breaks_the_group(stage: GroupStage, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    run(stage, all_reduce(x))
    stage.launches = SimpleNamespace(append=lambda launch: 1 / 0)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        run(stage, all_reduce(x))
    with pytest.raises(symm_mem.WeftError, match="ended by ZeroDivisionError"):
        run(stage, all_reduce(x))


def test_another_group_of_the_same_name(stage: GroupStage) -> None:
    """Also while the program keeps the one that it has destroyed."""
    x, kept = torch.randn(4), (stage.group, stage.lines)
    run(stage, all_reduce(x))
    run(stage, all_reduce(x))
    dist.destroy_process_group()
    stage.begin_group()
    assert kept[0] is not stage.group
    register_heap(stage.group, "cpu", -1, stage.where)
    stage.lines, before = DeviceLines(stage.group, NAME), stage.prepared
    run(stage, all_reduce(x))
    assert stage.prepared == before + 1


def start(stage: GroupStage, x: torch.Tensor, opts: Any = None) -> Any:
    """What the group's first look at a call makes of it, as functional collectives call: asynchronously."""
    taken = dict.fromkeys((ALL_REDUCE,), 0)
    group: Any = SimpleNamespace(_coalescing=False, _device=stage.lines, record=SimpleNamespace(taken=taken))
    work = WeftProcessGroup._launch_cached(group, ALL_REDUCE, x, x, opts or dist.AllreduceOptions())
    assert taken[ALL_REDUCE] == (work is not False)
    return work


def start_first(stage: GroupStage, x: torch.Tensor) -> None:
    assert start(stage, x) is False
    work = stage.lines.run([all_reduce(x)], asynchronous=True)
    assert not isinstance(work, str) and work.wait()


def test_an_asynchronous_call_like_one_before_is_launched_at_once(stage: GroupStage) -> None:
    x, y = torch.randn(5, 3), torch.randn(15)
    start_first(stage, x)
    stage.gpu.now = OTHER
    stage.gpu.launch("writes y")
    work = start(stage, y)
    assert isinstance(work, StreamWork) and work.result() == [y]
    assert stage.prepared == 1 and stage.workspace.noted == [ALL_REDUCE] * 2
    assert stage.launches == [(t.data_ptr(), t.data_ptr(), DEFAULT, SIDE) for t in (x, y)]
    side, others = stage.gpu.on[SIDE], stage.gpu.on[OTHER]
    assert side[-2:] == [("wait", "writes y"), "kernel"]
    assert others == ["writes y"], "what the stream does next does not wait yet"
    work.wait()
    assert others == ["writes y", ("wait", "kernel")]


@pytest.mark.parametrize("why", ["capturing", "size", "dtype", "deadline", "another device", "backend"])
def test_asynchronous_calls_that_are_made_ready_anew(stage: GroupStage, why: str) -> None:
    x, opts = torch.randn(6), dist.AllreduceOptions()
    start_first(stage, x)
    kept: Any = Event()  # any object of which there is a weak reference
    if why == "capturing":
        stage.gpu.graphs[STREAM] = ("ACTIVE", 77)
    elif why == "another device":
        stage.gpu.device = 1
    elif why == "backend":
        stage.lines.order_before(kept)
    x = {"size": x[:4], "dtype": x.half()}.get(why, x)
    if why == "deadline":
        opts.timeout = timedelta(seconds=2)
    before = len(stage.launches)
    assert start(stage, x, opts) is False
    assert len(stage.launches) == before


def test_how_much_python_an_asynchronous_call_costs(stage: GroupStage) -> None:
    x, calls = torch.randn(6), 0
    start_first(stage, x)

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    work = start(stage, x)
    sys.setprofile(None)
    work.wait()
    assert calls < 70  # 62, those of the stand-ins with them


def test_coalesced_calls_are_launched_one_by_one(stage: GroupStage) -> None:
    tensors = [torch.randn(n) for n in (3, 5)]
    run(stage, *map(all_reduce, tensors))
    assert [x for x, *_ in stage.launches] == [t.data_ptr() for t in reversed(tensors)]


@pytest.mark.parametrize("sizes", list(itertools.permutations((2, 25, 3))))
def test_all_coalesced_calls_are_left_where_one_is(
    stage: GroupStage, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the others were made before."""
    chosen = all_reduces.choose_sum_on_cuda
    monkeypatch.setattr(
        all_reduces,
        "choose_sum_on_cuda",
        lambda x, *rest: unfused("too large") if x.nbytes >= 100 else chosen(x, *rest),
    )
    tensors = {n: torch.randn(n) for n in sizes}
    run(stage, all_reduce(tensors[2]))
    stage.launches.clear()
    done = stage.lines.run([all_reduce(tensors[n]) for n in sizes], asynchronous=False)
    assert done == "too large" and not stage.launches
    run(stage, *(all_reduce(tensors[n]) for n in sizes if n != 25))
    assert len(stage.launches) == 2


def test_work_of_the_own_backend_is_waited_for(stage: GroupStage) -> None:
    waited = []

    class Work:
        def wait(self) -> None:
            waited.append(len(stage.launches))

    kept: Any = Work()
    stage.lines.order_before(kept)
    run(stage, all_reduce(torch.randn(4)))
    run(stage, all_reduce(torch.randn(4)))
    stage.lines.order_before(Work())  # type: ignore[arg-type]
    run(stage, all_reduce(torch.randn(4)))
    assert waited == [0]


def test_a_group_without_a_heap(stage: GroupStage) -> None:
    register_heap(stage.group, "cpu", -1, symm_mem.HeapUnavailable("no heap: two hosts"))
    assert stage.lines.run([all_reduce(torch.randn(4))], asynchronous=False) == "no heap: two hosts"
    assert not stage.launches and dist.is_initialized()
