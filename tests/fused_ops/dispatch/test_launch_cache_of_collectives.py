"""Collectives in the launch cache, without a GPU: which calls are launched at once, and what is launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import DEADLINE, NAME, SLOW, STREAM, Kernel, Stage, Workspace, assert_slow
from test_launch_cache_of_matmuls import CHANGES, OTHERS
from torch import Tensor
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch import all_reduces, choice, launch_cache, plan
from weft.fused_ops.ops import all_gather, all_reduce, reduce_scatter
from weft.kernels.all_reduce.configs import choose_all_reduce
from weft.symm_mem import call_cache, flight_recorder

gpu_stage = fake_gpu.stage
WEFT = torch.ops.weft


class Op:
    """One of them, along dimension 1 of 2 ranks, and what was made of it before: ``into`` a given tensor, too."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.kernel, self.name = stage, Kernel([]), name
        self.x = torch.randn(6, 8)
        self.module: Any = {
            "all_reduce": all_reduce,
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
        }[name]
        op = f"one_shot_{name}"
        self.arguments: Any
        self.call: Callable[[Tensor], Tensor]
        self.through_torch: Callable[[Tensor], Tensor]
        if name == "all_reduce":
            self.names, self.arguments, self.out = [op, f"{op}_"], "sum", self.x
            self.call = lambda x: fused_ops.one_shot_all_reduce(x, "sum", NAME)
            self.through_torch = lambda x: WEFT.one_shot_all_reduce(x, "sum", NAME)
            self.into: Callable[..., Tensor] = lambda x, out: fused_ops.one_shot_all_reduce_(x, "sum", NAME)
        elif name == "all_gather":
            self.names, self.arguments, self.out = [op, f"{op}_out"], 1, torch.empty(6, 16)
            self.call = lambda x: fused_ops.one_shot_all_gather(x, 1, NAME)
            self.through_torch = lambda x: WEFT.one_shot_all_gather(x, 1, NAME)
            self.into = lambda x, out: fused_ops.one_shot_all_gather(x, 1, NAME, out=out)
        else:
            self.names, self.arguments, self.out = [op, f"{op}_out"], (-1, "sum"), torch.empty(6, 4)
            self.call = lambda x: fused_ops.one_shot_reduce_scatter(x, "sum", -1, NAME)
            self.through_torch = lambda x: WEFT.one_shot_reduce_scatter(x, "sum", -1, NAME)
            self.into = lambda x, out: fused_ops.one_shot_reduce_scatter(x, "sum", -1, NAME, out=out)
        given = [self.x] if self.out is self.x else [self.out, self.x]
        self.remember(self.names[0], [self.x], [torch.empty_like(self.out)])
        self.remember(self.names[1], given, None)

    def remember(self, op: str, given: list[Tensor], results: list[Tensor] | None) -> None:
        self.stage.remember(self.kernel, op, self.arguments, given, results, alignment=1)

    def launched(self) -> list[tuple[Any, ...]]:
        found = list(self.kernel.launched)
        self.kernel.launched.clear()
        return found


@pytest.fixture(params=["all_reduce", "all_gather", "reduce_scatter"])
def op(gpu_stage: Stage, request: pytest.FixtureRequest) -> Op:
    return Op(gpu_stage, request.param)


def test_a_call_like_one_before_is_launched_at_once(op: Op) -> None:
    for call in (op.call, op.through_torch):
        out = call(op.x)
        assert out.shape == op.out.shape and out.is_contiguous() and out.data_ptr() != op.x.data_ptr()
        assert op.launched() == [(0, [op.x.data_ptr()], [out.data_ptr()], DEADLINE, STREAM)]
        assert plan.last_plan().algorithm == "push"
    assert op.stage.workspace.noted == [op.names[0]] * 2 and op.x._version == 0


def test_wherever_the_tensor_lies(op: Op) -> None:
    """Kernels take any address."""
    x = torch.randn(49)[1:].view(6, 8)
    out = op.call(x)
    assert op.launched() == [(0, [x.data_ptr()], [out.data_ptr()], DEADLINE, STREAM)]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_in_the_flight_recorder(gpu_stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flight_recorder, "calls", calls := deque[Any](maxlen=2))
    op = Op(gpu_stage, name)
    for _ in range(3):
        op.call(op.x)
    op.into(op.x, op.out)
    kind = flight_recorder.collective_of(name)
    shape = (kind, (6, 8), torch.float32, "cpu")
    assert [entry[:3] for entry in calls] == [(op.names[0], NAME, shape), (op.names[1], NAME, shape)]
    assert calls[1][4] == calls[0][4] + 1, "the sequence of the group's calls"


@pytest.mark.parametrize("seconds", [0.5, 2])
def test_into_a_given_tensor(op: Op, seconds: float) -> None:
    before = op.out._version
    assert op.into(op.x, op.out) is op.out
    assert op.launched() == [(0, [op.x.data_ptr()], [op.out.data_ptr()], DEADLINE, STREAM)]
    assert op.out._version > before, "autograd sees that it was overwritten"
    assert op.stage.workspace.noted == [op.names[1]], "an error names the op that was called"
    for said in (7, seconds):
        symm_mem.set_timeout(said, NAME)
        op.into(op.x, op.out)
        assert op.launched()[0][3] == int(said * 1e9), "the deadline that was said last"


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_it_is_not_launched(op: Op, change: str, found: bool) -> None:
    """Neither by what a workspace has prepared, nor by what a call before has found."""
    group, gpu = op.stage.group, op.stage.gpu  # a program may keep the group
    if found:
        op.call(op.x), op.into(op.x, op.out)
        op.launched()
    with ExitStack() as stack:
        CHANGES[change](op.stage, stack)
        for call in (lambda: op.call(op.x), lambda: op.into(op.x, op.out)):
            assert_slow(call)
    assert not op.launched() and group is not None
    if change in ("capturing", "device", "stream", "checked", "unfused"):  # what was found still holds
        gpu.device, gpu.now = 0, STREAM
        gpu.graphs.clear()
        op.call(op.x)
        assert len(op.launched()) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("other", [kind for kind in OTHERS if kind != "misaligned"])
def test_other_tensors_take_the_slow_path(op: Op, other: str, found: bool) -> None:
    if found:
        op.call(op.x)
        op.launched()
    x = OTHERS[other](op.x)
    assert launch_cache.launch_again(op.names[0], op.arguments, (x,), NAME, all_reduce.KINDS) is None
    if other in ("zero", "sparse", "nested"):
        with pytest.raises((*SLOW, RuntimeError)):
            op.call(x)
    assert not op.launched()


def test_what_takes_the_slow_path(op: Op) -> None:
    with torch.inference_mode():
        inference = torch.empty_like(op.out)
    others: list[tuple[Tensor, Tensor]] = [
        (op.x if op.out is not op.x else inference, inference),
        (op.x.clone().requires_grad_(), op.out),
        (op.x[:3], op.out),
    ]
    if op.out is not op.x:
        memory = torch.empty(200)
        part, whole = sorted((op.x, op.out), key=Tensor.numel)
        whole_there = memory[: whole.numel()].view(whole.shape)
        # Inside of the whole, but not where its part is.
        part_there = memory[16 : 16 + part.numel()].view(part.shape)
        others += [
            (whole_there, part_there) if whole is op.x else (part_there, whole_there),
            (op.x, op.out.clone().requires_grad_()),
            (op.x, torch.empty(*op.out.shape[:-1], 2 * op.out.shape[-1])[:, ::2]),
            (op.x, op.out.double()),
        ]
    for x, out in others:
        with suppress(ValueError, TypeError, symm_mem.WeftError):  # refused there, or it ends there
            op.into(x, out)
        assert not op.launched()


def test_wrong_arguments_are_refused_as_ever(gpu_stage: Stage) -> None:
    op = Op(gpu_stage, "all_reduce")
    for wrong in ((op.x.tolist(), "sum"), (op.x, ["sum"])):
        with pytest.raises(TypeError):
            fused_ops.one_shot_all_reduce(*wrong, NAME)
    assert_slow(lambda: fused_ops.one_shot_all_reduce(op.x, "max", NAME))
    assert not op.launched()


def test_gradients_are_recorded_around_it(op: Op) -> None:
    y = op.call(op.x.clone().requires_grad_())
    assert y.requires_grad and len(op.launched()) == 1


@pytest.mark.parametrize("found", [False, True])
def test_what_is_lazily_negated_is_negated_first(gpu_stage: Stage, found: bool) -> None:
    op = Op(gpu_stage, "all_reduce")
    if found:
        op.call(op.x)
    op.call(torch._neg_view(op.x))
    assert op.launched().pop()[1] != [op.x.data_ptr()]


def test_a_launch_that_fails_breaks_the_workspace(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(op.kernel, "launch", refused)
    with pytest.raises(RuntimeError, match="the driver refuses"):
        op.into(op.x, op.out)
    with pytest.raises(symm_mem.WeftError, match="a call was ended by"):
        op.call(op.x)


def test_a_call_that_cannot_be_ordered_is_not_noted(op: Op) -> None:
    """Errors name calls by how often kernels were launched: one that was noted and not launched would shift them."""

    def refused(stream: int) -> None:
        raise RuntimeError("the driver refuses")

    op.stage.gpu.orders[0] = SimpleNamespace(steps=lambda stream, external: (refused, None))
    with pytest.raises(RuntimeError, match="refuses"):
        op.call(op.x)
    assert not op.stage.workspace.noted and not op.launched() and op.stage.workspace.error is None


@pytest.mark.parametrize("agree", [True, False])
def test_a_call_that_ranks_would_run_differently_is_not_noted(
    gpu_stage: Stage, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(_: plan.Plan) -> None:
        if not agree:
            raise symm_mem.RankMismatch("a plan", NAME, 1, "unfused", "push")

    monkeypatch.setattr(choice, "ran", differ)
    stage, x, kernel = gpu_stage, torch.randn(5, 3), Kernel([])
    stage.workspace.prepared[15, x.dtype, "sum", choose_all_reduce(60, 2)] = kernel
    for into in (False, True):
        with nullcontext() if agree else pytest.raises(symm_mem.RankMismatch):
            sum_on_cuda(stage, x, into)
    assert len(stage.workspace.noted) == len(kernel.launched) == (2 if agree else 0)
    if agree:  # then the next ones are launched at once
        out = fused_ops.one_shot_all_reduce(x, "sum", NAME)
        fused_ops.one_shot_all_reduce_(x, "sum", NAME)
        assert [launch[1:3] for launch in kernel.launched[2:]] == [
            ([x.data_ptr()], [out.data_ptr()]),
            ([x.data_ptr()], [x.data_ptr()]),
        ]


def sum_on_cuda(stage: Stage, x: Tensor, into: bool) -> None:
    chosen = replace(all_reduces.choose_sum_on_cuda(x, "sum", stage.group), known=("sum", [x]))
    call, name = all_reduce.AllReduceCall(x, "sum", NAME), "one_shot_all_reduce" + "_" * into
    all_reduce.run_by_choice(chosen, stage.where, call, stage.group, x if into else None, name)


def test_one_rank_may_prepare_in_place_what_another_one_does_not(gpu_stage: Stage) -> None:
    names: list[Any] = []

    def prepare(*name_and_kind: Any) -> None:
        names.append(name_and_kind[:2])
        raise symm_mem.WeftError("another rank has failed")

    gpu_stage.workspace.heap = SimpleNamespace(prepare=prepare)
    for into in (False, True):
        with pytest.raises(symm_mem.WeftError, match="another rank"):
            sum_on_cuda(gpu_stage, torch.randn(5, 3), into)
    assert names == [("one_shot_all_reduce", ("one_shot_all_reduce", "one_shot", torch.float32, "sum"))] * 2


def test_what_changes_while_a_call_looks_is_not_kept(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread grows the workspace after this one has looked it up: the next call sees the new one."""
    looked_up, other = launch_cache.timeout, Workspace()

    def meanwhile(*args: Any) -> int:
        op.stage.workspaces["all_reduce", STREAM, 0] = other
        return looked_up(*args)

    monkeypatch.setattr(launch_cache, "timeout", meanwhile)
    op.call(op.x)
    op.launched()
    assert_slow(lambda: op.call(op.x))
    assert not op.launched()


def test_cached_calls_are_few(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MOST", 3)
    for rows in range(1, 16):
        x = torch.randn(rows, 8)
        op.remember(op.names[0], [x], [torch.empty_like(x)])
        op.call(x)
        assert len(op.launched()) == 1 and len(call_cache.cached_calls) <= 3
