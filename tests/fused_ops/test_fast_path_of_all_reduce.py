"""The short way of an all-reduce that was made before, without a GPU: when it is taken, and what it then launches."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft import symm_mem
from weft.fused_ops import one_shot_all_reduce, one_shot_all_reduce_
from weft.fused_ops.dispatch import plan, stream_order
from weft.fused_ops.ops import all_reduce
from weft.symm_mem import call_cache, timeouts
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.heap import registry

NAME = "a group"


@dataclass
class Kernel:
    launched: list[tuple[int, int, int, int]] = field(default_factory=list)
    grids: tuple[int, ...] = ()

    def launch(self, x: int, out: int, timeout_ns: int, stream: int) -> None:
        self.launched.append((x, out, timeout_ns, stream))


class Workspace:
    def abandon(self, cause: BaseException) -> None:
        self.error = symm_mem.WeftError(f"a call was ended by {cause!r}")

    def __init__(self) -> None:
        self.prepared: CachedDict[Any, Any] = CachedDict()
        self.error: Exception | None = None
        self.noted: list[str] = []

    def keep(self, key: Any, made: Any) -> None:
        self.prepared[key] = made

    def raise_if_broken(self, op: str, inside: int = 0, grids: tuple[int, ...] = ()) -> None:
        if self.error is not None:
            raise self.error
        self.noted.append(op)


class Group:
    """One that can be referred to weakly."""


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU, a group and a workspace that are none; x says that it lies on GPU 0."""
    group, kernel, workspace = Group(), Kernel(), Workspace()
    x = torch.randn(5, 3)
    stage = SimpleNamespace(group=group, owner=group, stream=7, capturing=False, device=0)
    workspace.prepared[15, x.dtype, "sum"] = all_reduce._Prepared(workspace, kernel, plan.Plan("push"), 123)
    where = SimpleNamespace(workspaces=CachedDict({("all_reduce", 7, 0): workspace}))
    monkeypatch.setattr(timeouts, "_per_group", CachedDict())
    monkeypatch.setitem(registry._heaps, (NAME, "cuda", 0), (weakref.ref(group), where))

    def resolve(name: str) -> object:
        if stage.group is None:
            raise RuntimeError("destroyed")
        return stage.group

    monkeypatch.setattr(registry, "_resolve_process_group", resolve)
    monkeypatch.setattr(stream_order, "_turns_of", lambda index: stream_order.StreamOrder(9))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (3, 0, 1), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: stage.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: stage.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stage.stream, raising=False)
    stage.x, stage.kernel, stage.workspace, stage.workspaces = x, kernel, workspace, where.workspaces
    return stage


def test_it_is_taken(stage: SimpleNamespace) -> None:
    x = stage.x
    out = all_reduce.fast_all_reduce(x, "sum", NAME)
    assert out is not None and out.shape == x.shape and out.data_ptr() != x.data_ptr()
    assert x._version == 0
    assert all_reduce.fast_all_reduce(x, "sum", NAME, x) is x
    assert x._version == 1, "autograd must know"
    symm_mem.set_timeout(0.5, NAME)
    all_reduce.fast_all_reduce(x, "sum", NAME, x)
    assert stage.kernel.launched == [
        (x.data_ptr(), out.data_ptr(), 123, 7),
        (x.data_ptr(), x.data_ptr(), 123, 7),
        (x.data_ptr(), x.data_ptr(), 500_000_000, 7),
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
def test_it_is_not_taken(
    stage: SimpleNamespace, why: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by what a workspace has prepared, nor by what a call ``before`` has found."""
    x, reduce_op = stage.x, "sum"
    if before:
        assert all_reduce.fast_all_reduce(x, reduce_op, NAME) is not None
        assert all_reduce.fast_all_reduce(x, reduce_op, NAME, x) is x
        stage.kernel.launched.clear()
    if why == "capturing":
        stage.capturing = True
    elif why == "device":
        stage.device = 1
    elif why == "group":
        stage.group = object()  # another one with the name of one that was destroyed
    elif why == "stream":
        stage.stream = 8
    elif why == "destroyed":
        stage.group = None
    elif why == "grown":
        stage.workspaces["all_reduce", 7, 0] = Workspace()
    elif why == "reset":
        stage.workspace.prepared.clear()
    elif why == "gone":
        del stage.workspaces["all_reduce", 7, 0]
    elif why == "another heap":
        where = SimpleNamespace(workspaces=CachedDict())
        monkeypatch.setitem(registry._heaps, (NAME, "cuda", 0), (weakref.ref(stage.group), where))
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
    if why in (
        "capturing",
        "device",
        "group",
        "destroyed",
        "stream",
    ):  # asked anew: what was found still holds
        stage.capturing, stage.device, stage.stream, stage.group = False, 0, 7, stage.owner
    if why in ("capturing", "device", "group", "destroyed", "stream", "checked", "forced"):
        assert all_reduce.fast_all_reduce(x, reduce_op, NAME) is not None


def test_a_broken_workspace_is_not_used(stage: SimpleNamespace) -> None:
    stage.workspace.error = symm_mem.WeftError("a wait has expired")
    with pytest.raises(symm_mem.WeftError, match="expired"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    assert not stage.kernel.launched


def test_a_launch_that_fails_breaks_the_workspace(
    stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(stage.kernel, "launch", refused)
    with pytest.raises(RuntimeError, match="refuses"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    with pytest.raises(symm_mem.WeftError, match="ended by RuntimeError"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)


def test_a_call_that_cannot_take_its_turn_is_not_noted(
    stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors name calls by how often kernels were launched: one that was noted and not launched would shift them."""

    def refused(stream: int) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(all_reduce, "steps_on", lambda *_: (refused, None))
    with pytest.raises(RuntimeError, match="refuses"):
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    assert not stage.workspace.noted and not stage.kernel.launched and stage.workspace.error is None


@pytest.mark.parametrize("agree", [True, False])
def test_a_call_that_ranks_would_run_differently_is_not_noted(
    stage: SimpleNamespace, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under what name the ranks prepare the call: one may make it in place and another one not.
    under: list[str] = []
    heap: Any = SimpleNamespace(world_size=2, group_name=NAME, prepare=lambda name, *_: under.append(name))
    prepared = stage.workspace.prepared[15, torch.float32, "sum"]

    def differ(_: plan.Plan) -> None:
        if not agree:
            raise symm_mem.RankMismatch("a plan", NAME, 1, "unfused", "push")

    monkeypatch.setattr(all_reduce, "heap_or_reason", lambda *_, **__: heap)
    monkeypatch.setattr(all_reduce, "in_stream_order", lambda device: nullcontext())
    monkeypatch.setattr(all_reduce, "num_sms", lambda device: 132)
    monkeypatch.setattr(all_reduce, "_prepare", lambda *_: prepared)
    monkeypatch.setattr(all_reduce, "ran", differ)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    x: Any = torch.empty(5, 3, device="meta")
    for out, op in ((None, "one_shot_all_reduce"), (x, "one_shot_all_reduce_")):
        with nullcontext() if agree else pytest.raises(symm_mem.RankMismatch):
            all_reduce.run_all_reduce(x, "sum", stage.group, out, op=op)
    assert len(stage.workspace.noted) == len(stage.kernel.launched) == (2 if agree else 0)
    assert under == ["one_shot_all_reduce"] * 2


def test_the_function_takes_it_without_the_dispatcher(stage: SimpleNamespace) -> None:
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
    stage: SimpleNamespace, other: Any, before: bool
) -> None:
    if before:
        one_shot_all_reduce(stage.x, "sum", NAME)
        stage.kernel.launched.clear()
    with pytest.raises((ValueError, RuntimeError)):  # the group is none
        one_shot_all_reduce(other(stage.x), "sum", NAME)
    assert not stage.kernel.launched


@pytest.mark.parametrize("before", [False, True])
def test_what_is_lazily_negated_is_negated_first(stage: SimpleNamespace, before: bool) -> None:
    if before:
        one_shot_all_reduce(stage.x, "sum", NAME)
    one_shot_all_reduce(torch._neg_view(stage.x), "sum", NAME)
    assert stage.kernel.launched.pop()[0] != stage.x.data_ptr()


def test_nccl_is_taken_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = all_reduce._nccl_from.__wrapped__
    monkeypatch.delenv("WEFT_NCCL_ALL_REDUCE_FROM", raising=False)
    assert asked() == float("inf")
    monkeypatch.setenv("WEFT_NCCL_ALL_REDUCE_FROM", "4096")
    assert asked() == 4096
    monkeypatch.setenv("WEFT_NCCL_ALL_REDUCE_FROM", "4 MiB")
    with pytest.raises(ValueError, match="WEFT_NCCL_ALL_REDUCE_FROM: is '4 MiB', must be a number of bytes"):
        asked()


def test_what_changes_while_a_call_looks_is_not_kept(
    stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread grows the workspace after this one has looked it up: the next call sees the new one."""
    looked_up, other = all_reduce.timeout, Workspace()

    def meanwhile(*args: Any) -> int:
        stage.workspaces["all_reduce", 7, 0] = other
        return looked_up(*args)

    monkeypatch.setattr(all_reduce, "timeout", meanwhile)
    all_reduce.fast_all_reduce(stage.x, "sum", NAME)
    assert all_reduce.fast_all_reduce(stage.x, "sum", NAME) is None


@pytest.mark.parametrize("seconds", [0.5, 2])
def test_the_deadline_is_what_was_said_last(stage: SimpleNamespace, seconds: float) -> None:
    for said in (7, seconds):
        symm_mem.set_timeout(said, NAME)
        all_reduce.fast_all_reduce(stage.x, "sum", NAME)
        assert stage.kernel.launched.pop()[2] == int(said * 1e9)


def test_findings_are_few(stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MOST", 3)
    for rows in range(1, 16):
        x = torch.randn(15).view(-1, 3)[:, :1].new_ones(rows, 15 // rows if 15 % rows == 0 else 1)
        all_reduce.fast_all_reduce(x, "sum", NAME)
        assert len(call_cache.cached_calls) <= 3
