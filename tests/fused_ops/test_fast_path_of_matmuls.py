"""The short way of a product that was called before, without a GPU: when it is taken, and what it then launches."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter
from weft.fused_ops.dispatch import plan, stream_order, workspaces
from weft.fused_ops.ops import all_gather_matmul, matmul_reduce_scatter
from weft.fused_ops.ops.calls import AllGatherMatmulCall, MatmulReduceScatterCall
from weft.kernels.all_gather_matmul.configs import GatherKernelCall
from weft.kernels.device.tuning.choice import KernelChoice
from weft.kernels.matmul_reduce_scatter.configs import ScatterKernelCall
from weft.symm_mem import timeouts
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.heap import registry
from weft.symm_mem.layout import Layout

NAME, WORLD_SIZE = "a group", 2
LONG = r"no process group is named 'a group'"  # what the long way says here, where there is none

WORD = {"all_gather_matmul": "gather", "matmul_reduce_scatter": "scatter"}
ON_CUDA = {name: f"weft.kernels.{name}.on_cuda" for name in WORD}


@dataclass
class Launcher:
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def launch(self, *args: Any) -> None:
        self.launched.append(args)


class Workspace:
    layout = SimpleNamespace(bytes=0)

    def __init__(self) -> None:
        self.prepared: CachedDict[Any, Any] = CachedDict()
        self.error: Exception | None = None

    def keep(self, key: Any, made: Any) -> None:
        self.prepared[key] = made

    def raise_if_broken(self, op: str, inside: int = 0, grids: tuple[int, ...] = ()) -> None:
        if self.error is not None:
            raise self.error

    def next_buffer(self) -> int:
        return 1

    def abandon(self, cause: BaseException) -> None:
        self.error = symm_mem.WeftError(f"a call was ended by {cause!r}")


class Group:
    """One that can be referred to weakly."""

    group_name = NAME


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU, a group and a workspace that are none; tensors say that they lie on GPU 0."""
    stage = SimpleNamespace(group=Group(), stream=7, capturing=False, device=0, workspace=Workspace())
    stage.launcher = Launcher()
    stage.workspaces = CachedDict()
    monkeypatch.setattr(timeouts, "_per_group", CachedDict())
    where = SimpleNamespace(workspaces=stage.workspaces, world_size=WORLD_SIZE, group_name=NAME)
    stage.where = where

    def resolve(name: str) -> object:
        if stage.group is None:
            raise RuntimeError("destroyed")
        return stage.group

    monkeypatch.setitem(registry._heaps, (NAME, "cuda", 0), (weakref.ref(stage.group), where))
    monkeypatch.setattr(registry, "_resolve_process_group", resolve)
    monkeypatch.setattr(stream_order, "_turns_of", lambda index: stream_order.StreamOrder(9))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (3, 0, 1), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: stage.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: stage.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stage.stream, raising=False)
    kept = stage.workspaces
    monkeypatch.setattr(
        workspaces, "_fetch", lambda _, kind, *__: kept.setdefault((kind, 7, 0), stage.workspace)
    )
    for op, module, layout in (
        ("all_gather_matmul", all_gather_matmul, Layout(WORLD_SIZE, 1, 8)),
        ("matmul_reduce_scatter", matmul_reduce_scatter, Layout(WORLD_SIZE, 0, 8, ll_protocol=True)),
    ):
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
        monkeypatch.setattr(module, "in_stream_order", lambda device: nullcontext())
        choice = KernelChoice("push", None, layout, profitable=True)
        monkeypatch.setattr(f"{ON_CUDA[op]}.choose_{WORD[op]}_kernel", lambda *_, choice=choice: choice)
        monkeypatch.setattr(f"{ON_CUDA[op]}.{WORD[op]}_launcher", lambda *_, **__: stage.launcher)

    def gathered(
        _: object, where: object, call: GatherKernelCall, *__: int
    ) -> tuple[Any, list[torch.Tensor]]:
        a = call.a
        A = a.new_empty(WORLD_SIZE, *a.shape) if call.return_A else None
        return A, [a.new_empty(WORLD_SIZE, len(a), b.shape[1]) for b in call.bs]

    def scattered(_: object, where: object, call: ScatterKernelCall, *__: int) -> torch.Tensor:
        a, columns = call.a, call.columns(WORLD_SIZE)
        return a.new_empty(a.shape[0], a.shape[2], columns, dtype=call.epilogue.out_dtype)

    monkeypatch.setattr("weft.kernels.all_gather_matmul.on_cuda.launch_all_gather_matmul", gathered)
    monkeypatch.setattr("weft.kernels.matmul_reduce_scatter.on_cuda.launch_matmul_reduce_scatter", scattered)
    return stage


@dataclass
class Op:
    """One of both ops: ``first`` is a call of the long way on CUDA, without what looks for a heap."""

    given: list[torch.Tensor]
    first: Callable[..., Any]
    call: Callable[..., Any]
    through_torch: Callable[..., Any]


OPS = ("all_gather_matmul", "matmul_reduce_scatter", "with_bias_and_residual")


@pytest.fixture(params=[*OPS, *(f"{name}-found" for name in OPS)])
def op(request: pytest.FixtureRequest, stage: SimpleNamespace) -> Op:
    """Called once before: on [3, 4, 8] shards and two matrices, or [6, 4, 8] and one, and what is added to that.

    Where it is found, a call has gone the short way, too: the next one need not look at its tensors one by one.
    """
    name, _, found = request.param.partition("-")
    if name == "all_gather_matmul":
        given = [torch.randn(3, 4, 8), torch.randn(8, 16), torch.randn(24, 8).t()]
        made = Op(
            given,
            lambda A, *Bs: all_gather_matmul._on_cuda(stage.where, AllGatherMatmulCall(A, list(Bs), 0, NAME)),
            lambda A, *Bs, **named: fused_all_gather_matmul(
                A, Bs, **{"gather_dim": 0, "group": NAME} | named
            ),
            lambda A, *Bs: torch.ops.weft.fused_all_gather_matmul(A, Bs, 0, NAME),
        )
    else:
        given = [torch.randn(6, 4, 8), torch.randn(8, 16), torch.randn(16), torch.randn(3, 4, 16)]
        del given[2 if name == "matmul_reduce_scatter" else 4 :]
        call, how = torch.ops.weft.fused_matmul_reduce_scatter, ("sum", 0, NAME, torch.float32)
        made = Op(
            given,
            lambda A, B, *more: matmul_reduce_scatter._on_cuda(
                stage.where, MatmulReduceScatterCall(A, B, *how, *more)
            ),
            lambda A, B, *more, **named: fused_matmul_reduce_scatter(
                A, B, **{"reduce_op": "sum", "scatter_dim": 0, "group": NAME} | terms(more) | named
            ),
            lambda A, B, *more: call(A, B, "sum", 0, NAME, **terms(more)),
        )
    made.first(*given)
    if found:
        made.call(*given)
        assert len(stage.launcher.launched) == 1
        stage.launcher.launched.clear()
    return made


def terms(more: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip(("bias", "residual"), more, strict=False))


def flat(results: Any) -> list[torch.Tensor]:
    """In the order of the launch: the gathered A is the last one."""
    return [results] if isinstance(results, torch.Tensor) else [*results[1], results[0]]


def test_it_launches_what_the_long_way_would(
    stage: SimpleNamespace, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = flat(op.first(*op.given))
    moved = [x.clone() for x in op.given]  # elsewhere, with the same strides
    for way in (op.call, op.through_torch):
        stage.launcher.launched.clear()
        got = flat(way(*moved))
        for x, y in zip(got, expected, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        operands, results = [x.data_ptr() for x in moved], [x.data_ptr() for x in got]
        assert stage.launcher.launched == [(1, operands, results, 300_000_000_000, 7)]
        assert plan.last_plan().algorithm == "push"
    symm_mem.set_timeout(0.5, NAME)
    op.call(*moved)
    assert stage.launcher.launched[-1][3] == 500_000_000


def test_dimensions_count_from_either_end(stage: SimpleNamespace) -> None:
    A, B = torch.randn(1, 4, 8), torch.randn(8, 16)
    _, (first,) = all_gather_matmul._on_cuda(stage.where, AllGatherMatmulCall(A, [B], 1, NAME, False))
    for dim in (1, -2):
        none, (got,) = fused_all_gather_matmul(A, [B], dim, NAME, return_A=False)
        assert none is None and (got.shape, got.stride()) == (first.shape, first.stride())
    assert len(stage.launcher.launched) == 2
    for dim in (-5, 3):
        with pytest.raises(ValueError, match="gather_dim: is"):
            fused_all_gather_matmul(A, [B], dim, NAME, return_A=False)


def test_few_python_calls(stage: SimpleNamespace, op: Op) -> None:
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


CHANGES: dict[str, Callable[[SimpleNamespace, ExitStack], Any]] = {
    "capturing": lambda stage, _: setattr(stage, "capturing", True),
    "device": lambda stage, _: setattr(stage, "device", 1),
    "stream": lambda stage, _: setattr(stage, "stream", 8),
    "unfused": lambda _, stack: stack.enter_context(plan.forced("unfused")),
    "checked": lambda _, stack: (stack.callback(symm_mem.set_checked, False), symm_mem.set_checked(True)),
    "another group": lambda stage, _: setattr(stage, "group", object()),
    "destroyed": lambda stage, _: setattr(stage, "group", None),
    "grown": lambda stage, _: stage.workspaces.update(dict.fromkeys(stage.workspaces, Workspace())),
    "gone": lambda stage, _: stage.workspaces.clear(),
    "reset": lambda stage, _: stage.workspace.prepared.clear(),
    "no heap": lambda *_: registry._heaps.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_not_taken_after_a_change(stage: SimpleNamespace, op: Op, change: str) -> None:
    """Neither by what a workspace has prepared, nor by what a call before has found."""
    with ExitStack() as stack:
        CHANGES[change](stage, stack)
        for way in (op.call, op.through_torch):
            with pytest.raises(ValueError, match=LONG):
                way(*op.given)
    assert not stage.launcher.launched
    stage.capturing, stage.device, stage.stream = False, 0, 7


class Sub(torch.Tensor): ...


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "size": lambda x: x[:2],
    "strides": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "dtype": lambda x: x.bfloat16(),
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
def test_other_tensors_go_the_long_way(stage: SimpleNamespace, op: Op, other: str, position: int) -> None:
    given, position = list(op.given), position % len(op.given)
    given[position] = OTHERS[other](given[position])
    short = (
        all_gather_matmul.fast_all_gather_matmul
        if len(given) == 3
        else matmul_reduce_scatter.fast_matmul_reduce_scatter
    )
    A, *rest = given
    arguments = (
        (rest, 0, NAME, True) if len(given) == 3 else (rest[0], "sum", 0, NAME, (*rest[1:], None, None)[:2])
    )
    assert short(A, *arguments) is None
    assert not stage.launcher.launched


def test_gradients_are_recorded(stage: SimpleNamespace, op: Op) -> None:
    """Below autograd the short way is taken, too."""
    A, *rest = op.given
    A.requires_grad_()
    for way in (op.call, op.through_torch):
        first = flat(way(A, *rest))[0]
        assert first.grad_fn is not None
        with torch.no_grad():
            assert flat(way(A, *rest))[0].grad_fn is None
    assert len(stage.launcher.launched) == 4


def test_what_does_not_pay_is_fused_only_where_it_is_asked_for(
    stage: SimpleNamespace, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = KernelChoice("push", None, Layout(WORLD_SIZE, 1, 8), profitable=False)
    for op_name, word in WORD.items():
        monkeypatch.setattr(f"{ON_CUDA[op_name]}.choose_{word}_kernel", lambda *_: choice)
    with plan.forced("fused"):
        op.first(*op.given)
        op.call(*op.given)
    assert len(stage.launcher.launched) == 1
    with pytest.raises(ValueError, match=LONG):
        op.call(*op.given)
    assert len(stage.launcher.launched) == 1


def test_what_was_copied_is_not_remembered(stage: SimpleNamespace, op: Op) -> None:
    stage.workspace.prepared.clear()
    A, *rest = op.given
    for given in ([misaligned(A), *rest], [A, *rest[:-1], misaligned(rest[-1].contiguous())]):
        op.first(*given)
        assert not stage.workspace.prepared


def test_a_broken_workspace_is_not_used(stage: SimpleNamespace, op: Op) -> None:
    stage.workspace.error = symm_mem.WeftError("a wait has expired")
    with pytest.raises(symm_mem.WeftError, match="expired"):
        op.call(*op.given)
    assert not stage.launcher.launched
