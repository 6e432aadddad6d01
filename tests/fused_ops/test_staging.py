"""Nothing is copied before it is clear that a kernel runs; then what does not lie as kernels take it, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.fused_ops.dispatch import plan
from weft.fused_ops.dispatch.staging import Staging, rows_of
from weft.fused_ops.ops import all_gather_matmul, all_reduce, matmul_all_reduce, matmul_reduce_scatter
from weft.fused_ops.ops.calls import AllGatherMatmulCall, MatmulReduceScatterCall
from weft.kernels.device.tuning.choice import KernelChoice
from weft.symm_mem.layout import Layout

SIZE = 2
WHERE: Any = SimpleNamespace(world_size=SIZE, group_name="a group", workspaces={})


def misaligned(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.randn(count + 1)[1:].view(shape)


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::contiguous"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_copies() -> Iterator[None]:
    with Copies() as seen:
        yield
    assert not seen.names


SHARD = torch.randn(4, 6, 8).transpose(0, 1)  # its rows lie at no one distance
CALLS: dict[str, Callable[[], object]] = {
    "all_gather_matmul": lambda: all_gather_matmul._on_cuda(
        WHERE, AllGatherMatmulCall(SHARD, [misaligned(8, 16), misaligned(8, 4)], 0, "a group", False)
    ),
    "matmul_reduce_scatter": lambda: matmul_reduce_scatter._on_cuda(
        WHERE, MatmulReduceScatterCall(SHARD, misaligned(8, 16), "sum", 0, "a group", torch.float32)
    ),
    "matmul_all_reduce": lambda: matmul_all_reduce._in_one_kernel(
        WHERE, misaligned(4, 8), misaligned(8, 16), "sum"
    ),
}


@pytest.fixture(params=["no kernel", "not profitable"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(SIZE, 0, 8)
    choice = "no kernel" if request.param == "no kernel" else KernelChoice("push", None, layout, False)
    for name in (
        "all_gather_matmul.on_cuda.choose_gather_kernel",
        "matmul_reduce_scatter.on_cuda.choose_scatter_kernel",
        "matmul_reduce_scatter.to_all.choose_sum_to_all",
    ):
        monkeypatch.setattr(f"weft.kernels.{name}", lambda *_: choice)
    for module in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce):
        monkeypatch.setattr(module, "num_sms", lambda device: 132)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_runs_unfused_copies_nothing(name: str) -> None:
    with no_copies():
        assert CALLS[name]() is None or isinstance(CALLS[name](), str)


def test_a_product_with_a_sum_behind_it_copies_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS takes it as it lies."""
    monkeypatch.setattr(matmul_all_reduce, "heap_or_reason", lambda *_, **__: WHERE)
    monkeypatch.setattr(matmul_all_reduce, "on", lambda device: nullcontext())
    monkeypatch.setattr(matmul_all_reduce, "num_sms", lambda device: 132)
    monkeypatch.setattr("weft.kernels.matmul_reduce_scatter.to_all.choose_sum_to_all", lambda *_: "no")
    monkeypatch.setattr("weft.kernels.matmul_all_reduce.configs.choose_matmul_all_reduce", lambda *_: None)
    monkeypatch.setattr(all_reduce, "in_place", lambda out, *_: out)
    monkeypatch.setattr(matmul_all_reduce, "_remember", lambda *_: None)
    A, B = misaligned(4, 8), misaligned(8, 16)
    monkeypatch.setattr(torch.Tensor, "device", SimpleNamespace(type="cuda", index=0))
    with no_copies():
        out = matmul_all_reduce.run_matmul_all_reduce(A, B, "sum", None)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert torch.equal(out, A @ B)


def test_what_lies_well_is_taken_as_it_is() -> None:
    staging, x = Staging(), torch.randn(3, 4, 8)
    assert staging.take("A", x) is x
    rows = staging.take("A", x, rows_of)
    assert rows.data_ptr() == x.data_ptr() and rows.shape == (12, 8)
    with no_copies():
        staging.copy()
    assert staging.reason == ""


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (misaligned(6, 8), "B begins 4 bytes behind a multiple of 16"),
        (misaligned(6, 8).t(), "B begins 4 bytes behind a multiple of 16"),
        (torch.randn(6, 20)[:, 1:9], "B begins 4 bytes behind a multiple of 16"),
        (SHARD, "B does not lie in rows"),
        (torch.empty(2, 3, 0).transpose(0, 1), ""),
    ],
)
def test_what_does_not_is_copied_once_and_said(x: Tensor, why: str) -> None:
    staging, shaped = Staging(), rows_of if x.dim() == 3 else lambda x: x
    with no_copies():
        taken = staging.take("B", x, shaped)
    staging.copy()
    assert taken.data_ptr() % 16 == 0 and torch.equal(taken, x.reshape(taken.shape))
    if x.dim() == 2 and x.is_contiguous() | x.t().is_contiguous():
        assert taken.stride() == x.stride(), "a weight that is transposed stays so"
    assert staging.reason == (f"each call copies operands: {why}" if why else "")


def test_why_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[plan.Plan] = []
    monkeypatch.setattr(all_gather_matmul, "ran", plans.append)
    on_cuda = "weft.kernels.all_gather_matmul.on_cuda"
    monkeypatch.setattr(all_gather_matmul, "num_sms", lambda device: 132)
    monkeypatch.setattr(all_gather_matmul, "in_stream_order", lambda device: nullcontext())
    workspace = SimpleNamespace(layout=SimpleNamespace(bytes=7), raise_if_broken=lambda op: None, prepared={})
    monkeypatch.setattr(all_gather_matmul, "product_workspace", lambda *_: workspace)
    choice = KernelChoice("push", None, Layout(SIZE, 0, 8), profitable=True)
    monkeypatch.setattr(f"{on_cuda}.choose_gather_kernel", lambda *_: choice)
    monkeypatch.setattr(f"{on_cuda}.tuned_gather", lambda *_, **__: (choice, "tuned"))
    seen: list[Tensor] = []

    def launch(*args: Any, **_: Any) -> tuple[None, list[Tensor]]:
        seen.extend(next(getattr(x, "bs", x) for x in args if isinstance(x, list) or hasattr(x, "bs")))
        return None, [torch.empty(SIZE, 4, 16)]

    monkeypatch.setattr(f"{on_cuda}.launch_all_gather_matmul", launch)
    B = misaligned(8, 16)
    all_gather_matmul._on_cuda(WHERE, AllGatherMatmulCall(torch.randn(4, 8), [B], 0, "a group", False))
    why = "each call copies operands: Bs[0] begins 4 bytes behind a multiple of 16"
    assert plans == [plan.Plan("push", why, 7, "tuned")]
    assert torch.equal(seen[0], B), "it is filled at the launch"
