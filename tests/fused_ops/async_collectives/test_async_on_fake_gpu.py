"""Collectives that copy engines carry, without a GPU: which calls they take, buffers, and the fast path."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import DEADLINE, NAME, STREAM, WORLD_SIZE, Stage
from torch import Tensor
from weft import symm_mem
from weft.fused_ops.async_collectives.call import AsyncCall, Started
from weft.fused_ops.async_collectives.on_cuda import CallsOnStream, choose_async, start_on_cuda
from weft.fused_ops.async_collectives.registration import fast_start
from weft.fused_ops.dispatch import plan
from weft.kernels.async_collectives.cuda_kernel import AsyncProblem

gpu_stage = fake_gpu.stage
PLACED = torch.full((WORLD_SIZE * 4, 4), 7.0)  # each buffer, of a call that is placed


class Collective:
    """Notes what is launched."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.fails = False

    def send(self, buffer: int, address: int, timeout_ns: int) -> None:
        if self.fails:
            raise RuntimeError("the driver refuses")
        self.done.append(("send", buffer, address, timeout_ns))

    def receive(self, *args: int) -> None:
        self.done.append(("receive", *args))

    def release(self, *args: int) -> None:
        self.done.append(("release", *args))


def call_of(x: Tensor, kind: str = "all_gather", placed: bool = False) -> AsyncCall:
    return AsyncCall(kind, x, "sum" if kind == "reduce_scatter" else "", NAME, placed, WORLD_SIZE)


class Asynchronous:
    """One workspace for each kind of call, in which its launches are made already."""

    def __init__(self, stage: Stage, x: Tensor) -> None:
        self.stage, self.collective = stage, Collective()
        workspace: Any = stage.workspace
        workspace.rank, workspace.taken = 1, []
        workspace.take_buffer = workspace.taken.append
        workspace.buffer = lambda rank, buffer, shape, dtype: PLACED.clone()
        for kind, placed in (("all_gather", False), ("all_gather", True), ("reduce_scatter", False)):
            call = call_of(x, kind, placed)
            stage.workspaces[call.workspace, STREAM, 0] = stage.workspace
            problem = AsyncProblem(call.part_bytes(WORLD_SIZE), call.reduce_op, x.dtype, placed)
            made = CallsOnStream(workspace, self.collective, call)
            workspace.prepared[problem, tuple(call.result_shape(WORLD_SIZE))] = made
            arguments = call.reduce_op, placed, WORLD_SIZE
            stage.remember(made, call.start, arguments, [x], [x.new_empty(0)], ran="copy_engine")

    def launched(self) -> list[tuple[Any, ...]]:
        done = list(self.collective.done)
        self.collective.done.clear()
        return done


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 4)


@pytest.fixture
def calls(gpu_stage: Stage, x: Tensor) -> Asynchronous:
    return Asynchronous(gpu_stage, x)


def slow(calls: Asynchronous, call: AsyncCall) -> Started:
    started = start_on_cuda(choose_async(call, WORLD_SIZE), calls.stage.where, call)
    assert isinstance(started, Started), started
    return started


def fast(calls: Asynchronous, call: AsyncCall) -> Started | None:
    token = fast_start(call)
    return None if token is None else token._weft_started  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("start", [slow, fast])
def test_a_gather_is_copied_out_of_its_buffer(
    calls: Asynchronous, x: Tensor, start: Callable[..., Started]
) -> None:
    call = call_of(x)
    started = start(calls, call)
    assert plan.last_plan().algorithm == "copy_engine"
    assert calls.launched() == [("send", 0, x.data_ptr(), DEADLINE)]
    out = started.wait(call)
    assert out.shape == (8, 4)
    assert calls.launched() == [("receive", 0, x.data_ptr(), out.data_ptr(), DEADLINE, STREAM)]
    with pytest.raises(ValueError, match="was waited for already"):
        started.wait(call)
    assert calls.stage.workspace.taken == [0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("start", [slow, fast])
def test_a_reduction_reads_its_own_part_where_it_lies(
    calls: Asynchronous, x: Tensor, start: Callable[..., Started]
) -> None:
    call = call_of(x, "reduce_scatter")
    started = start(calls, call)
    assert calls.launched() == [("send", 0, x.data_ptr(), DEADLINE)]
    out = started.wait(call)
    own = x[2:].data_ptr()  # of rank 1
    assert out.shape == (2, 4)
    assert calls.launched() == [("receive", 0, own, out.data_ptr(), DEADLINE, STREAM)]


@pytest.mark.parametrize("start", [slow, fast])
def test_what_is_placed_keeps_its_buffer_until_it_is_released(
    calls: Asynchronous, x: Tensor, start: Callable[..., Started]
) -> None:
    call = call_of(x, placed=True)
    first, second = start(calls, call), start(calls, call)
    with pytest.raises(RuntimeError, match="all_gather_start: 2 are on their way already"):
        start(calls, call)
    assert [each[:2] for each in calls.launched()] == [("send", 0), ("send", 1)]
    gathered = first.wait(call)
    assert gathered.eq(7).all() and [each[:2] for each in calls.launched()] == [("receive", 0)]
    with pytest.raises(RuntimeError, match="2 are on their way already"):
        start(calls, call)
    first.release(gathered)
    first.release(gathered)
    assert calls.launched() == [("release", 0, STREAM)]
    third = start(calls, call)
    assert calls.launched() == [("send", 0, x.data_ptr(), DEADLINE)]
    for each in (second, third):
        each.release(each.wait(call))


def test_an_operand_that_is_not_contiguous_is_copied_and_kept(calls: Asynchronous, x: Tensor) -> None:
    call = call_of(x.t())
    assert fast(calls, call) is None, "the fast path takes contiguous ones alone"
    started = slow(calls, call)
    ((_, _, address, _),) = calls.launched()
    assert address != x.data_ptr() and address % 16 == 0
    started.wait(call)
    ((_, _, own, *_),) = calls.launched()
    assert own == address, "the own part is that which was sent"


def test_parts_that_are_no_whole_vectors_are_left_to_the_groups_backend(calls: Asynchronous) -> None:
    for call in (call_of(torch.zeros(3)), call_of(torch.zeros(6), "reduce_scatter")):
        assert choose_async(call, WORLD_SIZE).reason == "a part has 12 bytes, no multiple of 16"
    assert not calls.launched()


def test_a_call_that_the_driver_refuses_breaks_the_group(calls: Asynchronous, x: Tensor) -> None:
    calls.collective.fails = True
    with pytest.raises(RuntimeError, match="the driver refuses"):
        slow(calls, call_of(x))
    calls.collective.fails = False
    for start in (slow, fast):
        with pytest.raises(symm_mem.WeftError, match="a call was ended by RuntimeError"):
            start(calls, call_of(x))
    assert not calls.launched()


def test_a_start_that_nobody_waits_for_breaks_the_group(calls: Asynchronous, x: Tensor) -> None:
    started = slow(calls, call_of(x))
    del started
    gc.collect()
    with pytest.raises(symm_mem.WeftError, match="all_gather_start was not waited for"):
        slow(calls, call_of(x))


def test_the_fast_path_is_for_what_it_has_seen(calls: Asynchronous, x: Tensor) -> None:
    for other in (torch.randn(8, 4), torch.randn(16), x.double()):
        assert fast(calls, call_of(other)) is None
    calls.stage.gpu.now = STREAM + 1
    assert fast(calls, call_of(x)) is None, "of another stream"
    calls.stage.gpu.now = STREAM
    with plan.forced("unfused"):
        assert fast(calls, call_of(x)) is None
    assert not calls.launched()
    started = fast(calls, call_of(x))
    assert started is not None
    started.wait(call_of(x))


def test_what_was_found_is_forgotten_with_its_group(calls: Asynchronous, x: Tensor) -> None:
    first = fast(calls, call_of(x))
    assert first is not None
    first.wait(call_of(x))
    torch.distributed.destroy_process_group()
    assert fast(calls, call_of(x)) is None
