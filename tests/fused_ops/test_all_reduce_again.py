"""The short way of an all-reduce that was made before, without a GPU: when it is taken, and what it then launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft import symm_mem
from weft.fused_ops import again, all_reduce, one_shot_all_reduce, one_shot_all_reduce_, plan
from weft.symm_mem import registry

NAME = "a group"


@dataclass
class Kernel:
    launched: list[tuple[int, int, int, int]] = field(default_factory=list)

    def launch(self, x: int, out: int, timeout_ns: int, stream: int) -> None:
        self.launched.append((x, out, timeout_ns, stream))


class Workspace:
    def abandon(self, cause: BaseException) -> None:
        self.error = symm_mem.WeftError(f"a call was ended by {cause!r}")

    def __init__(self) -> None:
        self.prepared: dict[Any, Any] = {}
        self.error: Exception | None = None

    def raise_if_broken(self, op: str, inside: int) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU, a group and a workspace that are none; x has no device number on the CPU, -1."""
    group, kernel, workspace = object(), Kernel(), Workspace()
    x = torch.randn(5, 3)
    stage = SimpleNamespace(group=group, stream=7, capturing=False, device=-1)
    workspace.prepared[15, x.dtype, "sum"] = all_reduce._Prepared(workspace, kernel, plan.Plan("push"), 123)
    where = SimpleNamespace(workspaces={("all_reduce", 7, 0): workspace})
    monkeypatch.setitem(registry._heaps, (NAME, "cuda", -1), (group, where))
    monkeypatch.setattr(registry, "_resolve_process_group", lambda name: stage.group)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: stage.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: stage.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stage.stream, raising=False)
    stage.x, stage.kernel, stage.workspace, stage.workspaces = x, kernel, workspace, where.workspaces
    return stage


def test_it_is_taken(stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    x = stage.x
    out = all_reduce.again(x, "sum", NAME)
    assert out is not None and out.shape == x.shape and out.data_ptr() != x.data_ptr()
    assert all_reduce.again(x, "sum", NAME, x) is x
    monkeypatch.setattr(again, "chosen_timeout", lambda name: 0.5)
    all_reduce.again(x, "sum", NAME, x)
    assert stage.kernel.launched == [
        (x.data_ptr(), out.data_ptr(), 123, 7),
        (x.data_ptr(), x.data_ptr(), 123, 7),
        (x.data_ptr(), x.data_ptr(), 500_000_000, 7),
    ]
    assert plan.last_plan().algorithm == "push"


@pytest.mark.parametrize(
    "why", ["capturing", "device", "group", "stream", "grown", "strides", "op", "size", "forced"]
)
def test_it_is_not_taken(stage: SimpleNamespace, why: str) -> None:
    x, reduce_op = stage.x, "sum"
    if why == "capturing":
        stage.capturing = True
    elif why == "device":
        stage.device = 0
    elif why == "group":
        stage.group = object()  # another one with the name of one that was destroyed
    elif why == "stream":
        stage.stream = 8
    elif why == "grown":
        stage.workspaces["all_reduce", 7, 0] = Workspace()
    elif why == "strides":
        x = x.t()
    elif why == "op":
        reduce_op = "max"
    elif why == "size":
        x = x[:4]
    if why == "forced":
        with plan.forced("unfused"):
            assert all_reduce.again(x, reduce_op, NAME) is None
    else:
        assert all_reduce.again(x, reduce_op, NAME) is None
    assert not stage.kernel.launched


def test_a_broken_workspace_is_not_used(stage: SimpleNamespace) -> None:
    stage.workspace.error = symm_mem.WeftError("a wait has expired")
    with pytest.raises(symm_mem.WeftError, match="expired"):
        all_reduce.again(stage.x, "sum", NAME)
    assert not stage.kernel.launched


def test_a_launch_that_fails_breaks_the_workspace(
    stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(stage.kernel, "launch", refused)
    with pytest.raises(RuntimeError, match="refuses"):
        all_reduce.again(stage.x, "sum", NAME)
    with pytest.raises(symm_mem.WeftError, match="ended by RuntimeError"):
        all_reduce.again(stage.x, "sum", NAME)


def test_the_function_takes_it_without_the_dispatcher(stage: SimpleNamespace) -> None:
    x = stage.x
    out = one_shot_all_reduce(x, "sum", NAME)
    assert one_shot_all_reduce_(x, "sum", NAME) is x
    assert [launch[:2] for launch in stage.kernel.launched] == [
        (x.data_ptr(), out.data_ptr()),
        (x.data_ptr(), x.data_ptr()),
    ]
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
def test_the_function_leaves_other_tensors_to_the_dispatcher(stage: SimpleNamespace, other: Any) -> None:
    with pytest.raises((ValueError, RuntimeError)):  # the group is none
        one_shot_all_reduce(other(stage.x), "sum", NAME)
    assert not stage.kernel.launched


def test_what_is_lazily_negated_is_negated_first(stage: SimpleNamespace) -> None:
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
