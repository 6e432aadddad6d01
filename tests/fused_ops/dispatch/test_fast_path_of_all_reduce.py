"""The fast path of an all-reduce that was made before, without a GPU: when it is taken, and what it then launches."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist
from fake_gpu import NAME, SLOW, STREAM, Stage, Workspace
from weft import symm_mem
from weft.fused_ops import one_shot_all_reduce, one_shot_all_reduce_
from weft.fused_ops.dispatch import all_reduces, plan
from weft.fused_ops.ops import all_reduce
from weft.symm_mem import call_cache, flight_recorder
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.failure.call_log import poison_on_error
from weft.symm_mem.heap.registry import register_heap

gpu_stage = fake_gpu.stage
DEFAULT = 123  # nanoseconds, of a call that was made before


class Kernel:
    grids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, int, int]] = []

    def launch(self, x: int, out: int, timeout_ns: int, stream: int) -> None:
        self.launched.append((x, out, timeout_ns, stream))


class AllReduces(Stage):
    """x was reduced before, on the slow path."""

    x: torch.Tensor
    kernel: Kernel


@pytest.fixture
def stage(gpu_stage: AllReduces) -> AllReduces:
    stage, x, kernel = gpu_stage, torch.randn(5, 3), Kernel()
    stage.x, stage.kernel = x, kernel
    made = all_reduces.PreparedAllReduce(stage.workspace, kernel, plan.Plan("push"), DEFAULT)  # type: ignore[arg-type]
    stage.workspace.prepared[15, x.dtype, "sum"] = made
    return stage


def test_in_the_flight_recorder(stage: AllReduces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "calls", calls := deque[Any]())
    all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    poison_on_error(all_reduce.fast_all_reduce)(
        stage.x, "sum", NAME
    )  # a part of another op, whose call is there
    shape = (flight_recorder.REDUCE, (5, 3), torch.float32, "cuda")
    assert [entry[:3] for entry in calls] == [("one_shot_all_reduce", NAME, shape)]


def test_it_is_taken(stage: AllReduces) -> None:
    x = stage.x
    out = all_reduce.fast_all_reduce(x, "sum", NAME)
    assert out is not None and out.shape == x.shape and out.data_ptr() != x.data_ptr()
    assert x._version == 0
    assert all_reduce.fast_all_reduce(x, "sum", NAME, x) is x
    assert x._version == 1, "autograd must know"
    symm_mem.set_timeout(0.5, NAME)
    all_reduce.fast_all_reduce(x, "sum", NAME, x)
    assert stage.kernel.launched == [
        (x.data_ptr(), out.data_ptr(), DEFAULT, STREAM),
        (x.data_ptr(), x.data_ptr(), DEFAULT, STREAM),
        (x.data_ptr(), x.data_ptr(), 500_000_000, STREAM),
    ]
    assert plan.last_plan().algorithm == "push"


WHY = [
    "capturing",
    "device",
    "group",
    "destroyed",
    "stream",
    "grown",
    "reset",
    "gone",
    "another heap",
    "checked",
]
WHY += ["forced", "strides", "op", "size", "dtype"]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("why", WHY)
def test_it_is_not_taken(stage: AllReduces, why: str, before: bool) -> None:
    """Neither by what a workspace has prepared, nor by what a call ``before`` has found."""
    x, reduce_op, group = stage.x, "sum", stage.group  # which a program may keep
    if before:
        assert all_reduce.fast_all_reduce(x, reduce_op, NAME) is not None
        assert all_reduce.fast_all_reduce(x, reduce_op, NAME, x) is x
        stage.kernel.launched.clear()
    if why == "capturing":
        stage.gpu.graphs[STREAM] = ("ACTIVE", 77)
    elif why == "device":
        stage.gpu.device = 1
    elif why == "group":
        dist.destroy_process_group()
        stage.begin_group()  # another one with its name
    elif why == "stream":
        stage.gpu.now = 8
    elif why == "destroyed":
        dist.destroy_process_group()
    elif why == "grown":
        stage.workspaces["all_reduce", STREAM, 0] = Workspace()
    elif why == "reset":
        stage.workspace.prepared.clear()
    elif why == "gone":
        del stage.workspaces["all_reduce", STREAM, 0]
    elif why == "another heap":
        another: Any = SimpleNamespace(workspaces=CachedDict())
        register_heap(stage.group, "cuda", 0, another)
    elif why == "checked":
        symm_mem.set_checked(True)
    elif why == "strides":
        x = x.t()
    elif why == "op":
        reduce_op = "max"
    elif why == "size":
        x = x[:4]
    elif why == "dtype":
        x = x.bfloat16()
    if why == "forced":
        with plan.forced("unfused"):
            assert all_reduce.fast_all_reduce(x, reduce_op, NAME) is None
    else:
        try:
            assert all_reduce.fast_all_reduce(x, reduce_op, NAME) is None
            assert all_reduce.fast_all_reduce(x, reduce_op, NAME, x) is None
        finally:
            symm_mem.set_checked(False)
    assert not stage.kernel.launched
    assert group is not None
    # Asked anew: what was found still holds.
    stage.gpu.device, stage.gpu.now = 0, STREAM
    stage.gpu.graphs.clear()
    if why in ("capturing", "device", "stream", "checked", "forced"):
        assert all_reduce.fast_all_reduce(x, reduce_op, NAME) is not None


def test_a_broken_workspace_is_not_used(stage: AllReduces) -> None:
    stage.workspace.error = symm_mem.WeftError("a wait has expired")
    with pytest.raises(symm_mem.WeftError, match="expired"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    assert not stage.kernel.launched


def test_a_launch_that_fails_breaks_the_workspace(stage: AllReduces, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(stage.kernel, "launch", refused)
    with pytest.raises(RuntimeError, match="refuses"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    with pytest.raises(symm_mem.WeftError, match="ended by RuntimeError"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)


def test_a_call_that_cannot_be_ordered_is_not_noted(stage: AllReduces) -> None:
    """Errors name calls by how often kernels were launched: one that was noted and not launched would shift them."""

    def refused(stream: int) -> None:
        raise RuntimeError("the driver refuses")

    stage.gpu.orders[0] = SimpleNamespace(steps=lambda stream, external: (refused, None))
    with pytest.raises(RuntimeError, match="refuses"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    assert not stage.workspace.noted and not stage.kernel.launched and stage.workspace.error is None


@pytest.mark.parametrize("agree", [True, False])
def test_a_call_that_ranks_would_run_differently_is_not_noted(
    stage: AllReduces, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(_: plan.Plan) -> None:
        if not agree:
            raise symm_mem.RankMismatch("a plan", NAME, 1, "unfused", "push")

    monkeypatch.setattr(all_reduce, "ran", differ)
    x = stage.x
    for out, op in ((torch.empty_like(x), "one_shot_all_reduce"), (x, "one_shot_all_reduce_")):
        with nullcontext() if agree else pytest.raises(symm_mem.RankMismatch):
            choice = all_reduces.choose_sum_on_cuda(x, "sum", stage.group)
            all_reduce._on_cuda(choice, stage.where, (x, out), "sum", op)
    assert len(stage.workspace.noted) == len(stage.kernel.launched) == (2 if agree else 0)
    # The ranks prepare it under one name: one may make it in place and another one not.
    assert stage.together == ["one_shot_all_reduce"] * 2


def test_the_function_takes_it_without_the_dispatcher(stage: AllReduces) -> None:
    x = stage.x
    out = one_shot_all_reduce(x, "sum", NAME)
    assert one_shot_all_reduce_(x, "sum", NAME) is x
    assert [launch[:2] for launch in stage.kernel.launched] == [
        (x.data_ptr(), out.data_ptr()),
        (x.data_ptr(), x.data_ptr()),
    ]
    assert stage.workspace.noted == ["one_shot_all_reduce", "one_shot_all_reduce_"]
    torch.ops.weft.one_shot_all_reduce_(x, "sum", NAME)
    assert stage.workspace.noted.pop() == "one_shot_all_reduce_"
    for wrong in ((x.tolist(), "sum"), (x, ["sum"])):
        with pytest.raises(TypeError):
            one_shot_all_reduce(*wrong, NAME)
    assert one_shot_all_reduce(x.requires_grad_(), "sum", NAME).grad_fn is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch._efficientzerotensor(x.shape),
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x, x]),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_the_function_leaves_other_tensors_to_the_dispatcher(
    stage: AllReduces, other: Any, before: bool
) -> None:
    if before:
        one_shot_all_reduce(stage.x, "sum", NAME)
        stage.kernel.launched.clear()
    with pytest.raises((*SLOW, RuntimeError)):
        one_shot_all_reduce(other(stage.x), "sum", NAME)
    assert not stage.kernel.launched


@pytest.mark.parametrize("before", [False, True])
def test_what_is_lazily_negated_is_negated_first(stage: AllReduces, before: bool) -> None:
    if before:
        one_shot_all_reduce(stage.x, "sum", NAME)
    one_shot_all_reduce(torch._neg_view(stage.x), "sum", NAME)
    assert stage.kernel.launched.pop()[0] != stage.x.data_ptr()


def test_nccl_is_taken_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = all_reduces.nccl_from.__wrapped__
    monkeypatch.delenv("WEFT_NCCL_ALL_REDUCE_FROM", raising=False)
    assert asked() == float("inf")
    monkeypatch.setenv("WEFT_NCCL_ALL_REDUCE_FROM", "4096")
    assert asked() == 4096
    monkeypatch.setenv("WEFT_NCCL_ALL_REDUCE_FROM", "4 MiB")
    with pytest.raises(ValueError, match="WEFT_NCCL_ALL_REDUCE_FROM: is '4 MiB', must be a number of bytes"):
        asked()


def test_what_changes_while_a_call_looks_is_not_kept(
    stage: AllReduces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread grows the workspace after this one has looked it up: the next call sees the new one."""
    looked_up, other = all_reduce.timeout, Workspace()

    def meanwhile(*args: Any) -> int:
        stage.workspaces["all_reduce", STREAM, 0] = other
        return looked_up(*args)

    monkeypatch.setattr(all_reduce, "timeout", meanwhile)
    all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    assert all_reduce.fast_all_reduce(stage.x, "sum", NAME) is None


@pytest.mark.parametrize("seconds", [0.5, 2])
def test_the_deadline_is_what_was_said_last(stage: AllReduces, seconds: float) -> None:
    for said in (7, seconds):
        symm_mem.set_timeout(said, NAME)
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
        assert stage.kernel.launched.pop()[2] == int(said * 1e9)


def test_cached_calls_are_few(stage: AllReduces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MOST", 3)
    for rows in range(1, 16):
        x = torch.randn(15).view(-1, 3)[:, :1].new_ones(rows, 15 // rows if 15 % rows == 0 else 1)
        all_reduce.fast_all_reduce(x, "sum", NAME)
        assert len(call_cache.cached_calls) <= 3
