"""Nothing is copied before it is clear that a kernel runs; then what does not lie as kernels take it, once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import NAME, Stage, run_on_cuda
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.fused_ops.dispatch import plan
from weft.fused_ops.dispatch.staging import Staging, in_rows, in_rows_or_columns, rows_of
from weft.fused_ops.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from weft.fused_ops.ops.all_gather_matmul import AllGatherMatmulCall
from weft.fused_ops.ops.matmul_all_reduce import MatmulAllReduceCall
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall
from weft.kernels.all_reduce.configs import choose_all_reduce

stage = fake_gpu.stage
SIZE = 2
GROUP: Any = SimpleNamespace(size=lambda: SIZE, rank=lambda: 0, group_name="")
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
CALLS: dict[str, Callable[[int], object]] = {
    "all_gather_matmul": lambda n: run_on_cuda(
        all_gather_matmul,
        WHERE,
        AllGatherMatmulCall(SHARD, [misaligned(8, n), misaligned(8, 4)], 0, "a group", False),
    ),
    "matmul_reduce_scatter": lambda n: run_on_cuda(
        matmul_reduce_scatter,
        WHERE,
        MatmulReduceScatterCall(SHARD, misaligned(8, n), "sum", 1, "a group", torch.float32),
    ),
    "matmul_all_reduce": lambda n: matmul_all_reduce._one_kernel(
        MatmulAllReduceCall(misaligned(4, 8), misaligned(8, n), "sum", "a group"), GROUP
    ),
}


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("n", [6, 16], ids=["rows", "not profitable"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_runs_unfused_copies_nothing(name: str, n: int) -> None:
    with no_copies():
        reason = CALLS[name](n)
    if name != "matmul_all_reduce":
        assert ("multiple of 16 bytes" if n == 6 else "too little") in str(reason)
    else:
        assert reason is None


def test_a_matmul_with_a_sum_behind_it_copies_no_weight(stage: Stage) -> None:
    """cuBLAS takes it as it lies."""
    A, B = misaligned(4, 8), misaligned(8, 16)
    key = 64, A.dtype, "sum", choose_all_reduce(256, 2)
    stage.workspace.prepared[key] = SimpleNamespace(launch=lambda *_: None, grids=())
    with no_copies():
        out = run_on_cuda(
            matmul_all_reduce, stage.where, MatmulAllReduceCall(A, B, "sum", NAME), group=stage.group
        )
    assert plan.last_plan().algorithm == "two_kernels" and torch.equal(out, A @ B)


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
        (misaligned(6, 8), "B begins 4 bytes after a multiple of 16"),
        (misaligned(6, 8).t(), "B begins 4 bytes after a multiple of 16"),
        (torch.randn(6, 20)[:, 1:9], "B begins 4 bytes after a multiple of 16"),
        (SHARD, "B does not lie in rows"),
        (torch.randn(6, 9)[:, :8], "B does not lie in rows"),
        (torch.randn(6, 16)[:, ::2], "B does not lie in rows"),
        (torch.empty(2, 3, 0).transpose(0, 1), ""),
    ],
)
def test_what_does_not_is_copied_once_and_said(x: Tensor, why: str) -> None:
    staging, shaped = Staging(), rows_of if x.dim() == 3 else lambda x: x
    with no_copies():
        taken = staging.take("B", x, shaped, in_rows_or_columns if x.dim() == 2 else in_rows)
    staging.copy()
    assert taken.data_ptr() % 16 == 0 and torch.equal(taken, x.reshape(taken.shape))
    if x.dim() == 2 and x.is_contiguous() | x.t().is_contiguous():
        assert taken.stride() == x.stride(), "a weight that is transposed stays so"
    assert staging.reason == (f"each call copies operands: {why}" if why else "")


def test_why_is_in_the_plan(stage: Stage) -> None:
    A, B, seen = torch.randn(4, 8).bfloat16(), misaligned(8, 16).bfloat16(), []
    B = torch.empty(129, dtype=B.dtype)[1:].view(8, 16).copy_(B)

    class Kernel:
        def launch(self, buffer: int, operands: list[int], *_: Any) -> None:
            seen.append(ctypes.string_at(operands[1], B.nbytes))

    stage.workspace.prepared.kernel = Kernel()
    run_on_cuda(all_gather_matmul, stage.where, AllGatherMatmulCall(A, [B], 0, NAME, True))
    why = "each call copies operands: Bs[0] begins 2 bytes after a multiple of 16"
    assert replace(plan.last_plan(), predicted_us=None) == plan.Plan("push", why, 0)
    assert torch.equal(torch.frombuffer(bytearray(seen[0]), dtype=B.dtype).view(8, 16), B), (
        "filled at the launch"
    )
