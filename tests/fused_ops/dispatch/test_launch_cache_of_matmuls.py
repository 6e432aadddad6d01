"""The fast path of a matmul that was called before, without a GPU: when it is taken, and what it then launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist
from fake_gpu import DEADLINE, NAME, SLOW, STREAM, TAKEN, Stage, Workspace, assert_slow, run_on_cuda
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter
from weft.fused_ops.dispatch import launch_cache, plan
from weft.fused_ops.ops import (
    ALL_GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    all_gather_matmul,
    matmul_reduce_scatter,
)
from weft.fused_ops.ops.all_gather_matmul import AllGatherMatmulCall
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.device.device_spec import H200
from weft.symm_mem import HeapUnavailable
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.heap.registry import register_heap

stage = fake_gpu.stage
BF16 = torch.bfloat16


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


@dataclass
class Op:
    """One of both ops: ``first`` is a call of the slow path on CUDA, without what looks for a heap."""

    given: list[torch.Tensor]
    first: Callable[..., Any]
    call: Callable[..., Any]
    through_torch: Callable[..., Any]


OPS = ("all_gather_matmul", "matmul_reduce_scatter", "with_bias_and_residual")


@pytest.fixture(params=[*OPS, *(f"{name}-found" for name in OPS)])
def op(request: pytest.FixtureRequest, stage: Stage) -> Op:
    """Called once before: on [3, 4, 8] shards and two matrices, or [512, 8, 8] and one, and what is added
    to that: by kernels that push.

    Where it is found, a call has taken the fast path, too: the next one need not look at its tensors one by one.
    """
    name, _, found = request.param.partition("-")
    if name == "all_gather_matmul":
        given = [numbers(3, 4, 8), numbers(8, 16), numbers(8, 24)]
        made = Op(
            given,
            lambda A, *Bs: run_on_cuda(
                all_gather_matmul, stage.where, AllGatherMatmulCall(A, list(Bs), 0, NAME)
            ),
            lambda A, *Bs, **named: fused_all_gather_matmul(
                A, Bs, **{"gather_dim": 0, "group": NAME} | named
            ),
            lambda A, *Bs: torch.ops.weft.fused_all_gather_matmul(A, Bs, 0, NAME),
        )
    else:
        given = [numbers(512, 8, 8), numbers(8, 1024), numbers(1024), numbers(256, 8, 1024)]
        del given[2 if name == "matmul_reduce_scatter" else 4 :]
        call, how = torch.ops.weft.fused_matmul_reduce_scatter, ("sum", 0, NAME, BF16)
        made = Op(
            given,
            lambda A, B, *more: run_on_cuda(
                matmul_reduce_scatter, stage.where, MatmulReduceScatterCall(A, B, *how, *more)
            ),
            lambda A, B, *more, **named: fused_matmul_reduce_scatter(
                A, B, **{"reduce_op": "sum", "scatter_dim": 0, "group": NAME} | terms(more) | named
            ),
            lambda A, B, *more: call(A, B, "sum", 0, NAME, **terms(more)),
        )
    made.first(*given)
    assert len(stage.launched) == 1
    stage.launched.clear()
    if found:
        made.call(*given)
        assert len(stage.launched) == 1
        stage.launched.clear()
    return made


def terms(more: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip(("bias", "residual"), more, strict=False))


def flat(results: Any) -> list[torch.Tensor]:
    """In the order of the launch: the gathered A is the last one."""
    return [results] if isinstance(results, torch.Tensor) else [*results[1], results[0]]


def test_it_launches_what_the_slow_path_would(stage: Stage, op: Op) -> None:
    expected = flat(op.first(*op.given))
    moved = [x.clone() for x in op.given]  # elsewhere, with the same strides
    for way in (op.call, op.through_torch):
        stage.launched.clear()
        got = flat(way(*moved))
        for x, y in zip(got, expected, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        operands, results = [x.data_ptr() for x in moved], [x.data_ptr() for x in got]
        assert stage.launched == [(1, operands, results, DEADLINE, STREAM)]
        assert plan.last_plan().algorithm == "push"
    symm_mem.set_timeout(0.5, NAME)
    op.call(*moved)
    assert stage.launched[-1][3] == 500_000_000


def test_where_a_gradient_is_wanted_autograd_launches_it(
    stage: Stage, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the dispatcher, unless it has more to do."""
    wanted = [x.clone().requires_grad_() for x in op.given]
    monkeypatch.setattr("weft.fused_ops.library.call.schema", SimpleNamespace())
    assert all(y.requires_grad for y in flat(op.call(*wanted))) and len(stage.launched) == 1
    with torch.autocast("cpu"), pytest.raises(AttributeError, match="matmul"):
        op.call(*wanted)


def test_dimensions_count_from_either_end(stage: Stage) -> None:
    A, B = numbers(1, 4, 8), numbers(8, 16)
    for dim in (1, -2):
        call = AllGatherMatmulCall(A, [B], 1, NAME, False)
        given = call._replace(gather_dim=dim)
        _, (first,) = run_on_cuda(all_gather_matmul, stage.where, call, given=given)
        none, (got,) = fused_all_gather_matmul(A, [B], dim, NAME, return_A=False)
        assert none is None and (got.shape, got.stride()) == (first.shape, first.stride())
    assert len(stage.launched) == 4
    for dim in (-5, 3):
        with pytest.raises(ValueError, match="gather_dim: is"):
            fused_all_gather_matmul(A, [B], dim, NAME, return_A=False)


def test_few_python_calls(stage: Stage, op: Op) -> None:
    """What the host's time is made of. Of the fakes there are nine."""
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    op.call(*op.given)
    sys.setprofile(counted)
    try:
        op.call(*op.given)
    finally:
        sys.setprofile(None)
    assert count < 30


CHANGES: dict[str, Callable[[Stage, ExitStack], Any]] = {
    "capturing": lambda stage, _: stage.gpu.graphs.update({STREAM: ("ACTIVE", 77)}),
    "device": lambda stage, _: setattr(stage.gpu, "device", 1),
    "stream": lambda stage, _: setattr(stage.gpu, "now", 8),
    "unfused": lambda _, stack: stack.enter_context(plan.forced("unfused")),
    "checked": lambda _, stack: (stack.callback(symm_mem.set_checked, False), symm_mem.set_checked(True)),
    "another group": lambda stage, _: (dist.destroy_process_group(), stage.begin_group()),
    "destroyed": lambda *_: dist.destroy_process_group(),
    "grown": lambda stage, _: stage.workspaces.update(dict.fromkeys(stage.workspaces, Workspace())),
    "gone": lambda stage, _: stage.workspaces.clear(),
    "reset": lambda stage, _: stage.workspace.prepared.clear(),
    "another heap": lambda stage, _: register_heap(
        stage.group, "cuda", 0, SimpleNamespace(workspaces=CachedDict())
    ),
    "no heap": lambda stage, _: register_heap(stage.group, "cuda", 0, HeapUnavailable("no")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_not_taken_after_a_change(stage: Stage, op: Op, change: str) -> None:
    """Neither by what a workspace has prepared, nor by what a call before has found."""
    group = stage.group  # which a program may keep
    with ExitStack() as stack:
        CHANGES[change](stage, stack)
        for way in (op.call, op.through_torch):
            assert_slow(lambda way=way: way(*op.given))  # type: ignore[misc]
    assert not stage.launched
    assert group is not None


class Sub(torch.Tensor): ...


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "size": lambda x: x[:2],
    "strides": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "subclass": lambda x: x.as_subclass(Sub),
    "negated": torch._neg_view,
    "functional": torch._to_functional_tensor,
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "misaligned": misaligned,
    "gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_other_tensors_take_the_slow_path(stage: Stage, op: Op, other: str, position: int) -> None:
    given, position = list(op.given), position % len(op.given)
    given[position] = OTHERS[other](given[position])
    A, *rest = given
    made: Any
    if len(given) == 3:
        made = ALL_GATHER_MATMUL, AllGatherMatmulCall(A, rest, 0, NAME)
    else:
        terms = (*rest[1:], None, None)[:2]
        made = MATMUL_REDUCE_SCATTER, MatmulReduceScatterCall(A, rest[0], "sum", 0, NAME, None, *terms)
    of, call = made
    assert of.fast(call) is None
    assert not stage.launched


def test_gradients_are_recorded(stage: Stage, op: Op) -> None:
    """Below autograd the fast path is taken, too."""
    A, *rest = op.given
    A.requires_grad_()
    for way in (op.call, op.through_torch):
        first = flat(way(A, *rest))[0]
        assert first.grad_fn is not None
        with torch.no_grad():
            assert flat(way(A, *rest))[0].grad_fn is None
    assert len(stage.launched) == 4


def test_a_call_is_looked_up_once_in_each_state_of_the_thread(
    stage: Stage, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on guards know it: also of a parameter whose gradient is not wanted."""
    A, *rest = op.given

    def call_in_each() -> None:
        op.call(A, *rest)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                op.call(torch.nn.Parameter(A), *rest)

    call_in_each()
    monkeypatch.setattr(launch_cache, "_checked_key", lambda *_: None)
    call_in_each()
    assert len(stage.launched) == 6


def test_what_is_not_profitable_is_fused_only_where_it_is_asked_for(stage: Stage) -> None:
    A, B = numbers(1, 8192), numbers(8192, 8)

    def slow_path() -> Any:
        return run_on_cuda(all_gather_matmul, stage.where, AllGatherMatmulCall(A, [B], 0, NAME))

    assert slow_path() == "too little is gathered and multiplied"
    with plan.forced("fused"):
        slow_path()
        fused_all_gather_matmul(A, [B], 0, NAME)
    assert len(stage.launched) == 2
    with pytest.raises(SLOW, match=TAKEN):
        fused_all_gather_matmul(A, [B], 0, NAME)
    assert len(stage.launched) == 2


@pytest.mark.parametrize("asked", ["push", "one_shot"])
def test_the_kernel_that_was_asked_for_is_launched_while_it_is_asked_for(stage: Stage, asked: str) -> None:
    A, B = numbers(64, 128), numbers(128, 64)
    call = AllGatherMatmulCall(A, [B], 0, NAME, False)
    for algorithm in ("fused", asked, "fused", asked):
        with plan.forced(algorithm):
            with pytest.raises(SLOW, match=TAKEN):  # what another kernel left behind is not taken
                fused_all_gather_matmul(A, [B], 0, NAME, return_A=False)
            run_on_cuda(all_gather_matmul, stage.where, call)
            chosen, count = plan.last_plan().algorithm, len(stage.launched)
            assert chosen == asked or algorithm == "fused"
            fused_all_gather_matmul(A, [B], 0, NAME, return_A=False)
            assert plan.last_plan().algorithm == chosen and len(stage.launched) == count + 1


def test_what_was_copied_is_not_remembered(stage: Stage, op: Op) -> None:
    stage.workspace.prepared.clear()
    A, *rest = op.given
    for given in ([misaligned(A), *rest], [A, *rest[:-1], misaligned(rest[-1].contiguous())]):
        op.first(*given)
        assert not stage.workspace.prepared


def test_a_broken_workspace_is_not_used(stage: Stage, op: Op) -> None:
    stage.workspace.error = symm_mem.WeftError("a wait has expired")
    with pytest.raises(symm_mem.WeftError, match="expired"):
        op.call(*op.given)
    assert not stage.launched


def test_copy_engines_around_cublas_where_kernel_cu_does_not_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_configs, "device_spec_of", lambda device, **_: replace(H200, has_gemm=False))
    given = x, *ws = [numbers(16, 32), numbers(32, 24), numbers(32, 8)]
    with plan.forced("copy_engine"):
        found = [
            run_on_cuda(all_gather_matmul, stage.where, AllGatherMatmulCall(x, ws, 0, NAME, True)),
            fused_all_gather_matmul(x, ws, 0, NAME),
        ]
        assert plan.last_plan().algorithm == "copy_engine"
    assert not stage.workspace.noted, "its launcher notes the call"
    for (A, outs), (_, operands, results, *_) in zip(found, stage.launched, strict=True):
        assert operands == [t.data_ptr() for t in given]
        assert results == [t.data_ptr() for t in (*outs, A)]
        assert [tuple(t.shape) for t in (*outs, A)] == [(32, 24), (32, 8), (32, 32)]
