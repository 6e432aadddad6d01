"""The fast paths of one_shot_all_gather and one_shot_reduce_scatter, without a GPU: when they are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import DEADLINE, NAME, STREAM, Kernel, Stage, assert_slow
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import one_shot_all_gather, one_shot_reduce_scatter
from weft.fused_ops.dispatch import fast_path, plan
from weft.fused_ops.dispatch.stand_alone import _IntoLauncher
from weft.fused_ops.ops import all_gather, reduce_scatter
from weft.symm_mem import flight_recorder

gpu_stage = fake_gpu.stage
WEFT = torch.ops.weft


class Op:
    """One of both, along its dimension 1 of 2 ranks, and what was made of it before."""

    def __init__(self, stage: Stage, gathers: bool) -> None:
        self.stage, self.kernel = stage, Kernel([])
        self.x = torch.randn(6, 8)
        self.out = torch.empty(6, 16 if gathers else 4)
        arguments: Any = 1 if gathers else (1, "sum")
        self.module: Any = all_gather if gathers else reduce_scatter
        host, workspace, kernel = self.module.host, stage.workspace, self.kernel
        into = [self.out, self.x]
        for op, given, results, launcher in (
            (host.OP, [self.x], [torch.empty_like(self.out)], kernel),
            (host.INTO, into, [], _IntoLauncher(kernel)),
        ):
            made = fast_path.LaunchedCall(op, arguments, given, given, results)
            fast_path.remember_call(made, workspace, launcher, plan.Plan("push"), profitable=True)
        self.names = [host.OP, host.INTO]
        if gathers:
            self.call: Callable[..., Tensor] = lambda x, **named: one_shot_all_gather(x, 1, NAME, **named)
            self.through_torch: Callable[[Tensor], Tensor] = lambda x: WEFT.one_shot_all_gather(x, -1, NAME)
        else:
            self.call = lambda x, **named: one_shot_reduce_scatter(x, "sum", -1, NAME, **named)
            self.through_torch = lambda x: WEFT.one_shot_reduce_scatter(x, "sum", 1, NAME)

    def launched(self) -> list[tuple[Any, ...]]:
        found = list(self.kernel.launched)
        self.kernel.launched.clear()
        return found


@pytest.fixture(params=[True, False], ids=["all_gather", "reduce_scatter"])
def op(gpu_stage: Stage, request: pytest.FixtureRequest) -> Op:
    return Op(gpu_stage, request.param)


def test_a_call_like_one_before_is_launched_at_once(op: Op) -> None:
    for call in (op.call, op.through_torch):
        out = call(op.x)
        assert out.shape == op.out.shape and out.is_contiguous()
        assert op.launched() == [(0, [op.x.data_ptr()], [out.data_ptr()], DEADLINE, STREAM)]
        assert plan.last_plan().algorithm == "push"
    assert op.stage.workspace.noted == [op.names[0]] * 2


@pytest.mark.parametrize("gathers", [True, False])
def test_in_the_flight_recorder(gpu_stage: Stage, monkeypatch: pytest.MonkeyPatch, gathers: bool) -> None:
    monkeypatch.setattr(flight_recorder, "calls", calls := deque[Any](maxlen=2))
    op = Op(gpu_stage, gathers)
    for _ in range(3):
        op.call(op.x)
    op.call(op.x, out=op.out)
    kind = flight_recorder.GATHER if gathers else flight_recorder.SCATTER
    shape = (kind, (6, 8), torch.float32, "cpu")
    assert [entry[:3] for entry in calls] == [(op.names[0], NAME, shape), (op.names[1], NAME, shape)]
    assert calls[1][4] == calls[0][4] + 1, "the sequence of the group's calls"


def test_into_a_given_tensor(op: Op) -> None:
    before = op.out._version
    assert op.call(op.x, out=op.out) is op.out
    assert op.launched() == [(0, [op.x.data_ptr()], [op.out.data_ptr()], DEADLINE, STREAM)]
    assert op.out._version > before, "autograd sees that it was overwritten"
    assert op.stage.workspace.noted == [op.names[1]], "an error names the op that was called"
    symm_mem.set_timeout(0.5, NAME)
    op.call(op.x, out=op.out)
    assert op.launched()[0][3] == 500_000_000


def test_what_takes_the_slow_path(op: Op) -> None:
    memory = torch.empty(200)
    part, whole = sorted((op.x, op.out), key=Tensor.numel)
    whole_there = memory[: whole.numel()].view(whole.shape)
    part_there = memory[16 : 16 + part.numel()].view(
        part.shape
    )  # inside of the whole, but not where its part is
    overlapping = (whole_there, part_there) if whole is op.x else (part_there, whole_there)
    with torch.inference_mode():
        inference = torch.empty_like(op.out)
    for x, out in (
        overlapping,
        (op.x, inference),
        (op.x, op.out.clone().requires_grad_()),
        (op.x.clone().requires_grad_(), op.out),
        (op.x, torch.empty(*op.out.shape[:-1], 2 * op.out.shape[-1])[:, ::2]),
        (op.x, op.out.double()),
        (op.x[:3], op.out),
    ):
        with suppress(ValueError, TypeError, symm_mem.WeftError):  # refused there, or it ends there
            op.call(x, out=out)
        assert not op.launched()
    for x in (op.x.t().contiguous().t(), op.x.bfloat16()):
        assert_slow(lambda x=x: op.call(x))
        assert not op.launched()
    with plan.forced("unfused"):
        assert_slow(lambda: op.call(op.x))
    op.stage.gpu.graphs[STREAM] = ("ACTIVE", 1)
    assert_slow(lambda: op.call(op.x, out=op.out))
    assert not op.launched()


def test_gradients_are_recorded_around_it(op: Op) -> None:
    y = op.call(op.x.clone().requires_grad_())
    assert y.requires_grad and len(op.launched()) == 1


def test_a_launch_that_fails_breaks_the_workspace(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(op.kernel, "launch", refused)
    with pytest.raises(RuntimeError, match="the driver refuses"):
        op.call(op.x, out=op.out)
    with pytest.raises(symm_mem.WeftError, match="a call was ended by"):
        op.call(op.x)
