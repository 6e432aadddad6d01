"""Where TF32 is allowed for products of float32, cuBLAS takes them: kernels of our own are exact, and slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import run_on_cuda
from weft.fused_ops.dispatch import plan
from weft.fused_ops.dispatch.profitability import FusionCandidate, why_not_profitable
from weft.fused_ops.ops import all_gather_matmul, matmul_reduce_scatter
from weft.fused_ops.ops.all_gather_matmul import AllGatherMatmulCall
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.all_gather_matmul import on_cuda as gather_on_cuda
from weft.kernels.device.tuning.choice import KernelChoice
from weft.kernels.matmul_reduce_scatter import configs as scatter
from weft.kernels.matmul_reduce_scatter import on_cuda as scatter_on_cuda
from weft.symm_mem.layout import Layout

stage = fake_gpu.stage

matmul = torch.backends.cuda.matmul
WAYS: dict[str, Callable[[], None]] = {
    "allow_tf32": lambda: setattr(matmul, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "fp32_precision": lambda: setattr(matmul, "fp32_precision", "tf32"),
    "of all backends": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = "none"
    assert not plan.tf32_is_allowed()


def calls(dtype: torch.dtype) -> list[object]:
    where: Any = SimpleNamespace(world_size=2)
    a, b = torch.ones(4, 8, dtype=dtype), torch.ones(8, 6, dtype=dtype)  # for which there is no kernel
    return [
        run_on_cuda(all_gather_matmul, where, AllGatherMatmulCall(a, [b], 0, "a group", False)),
        run_on_cuda(matmul_reduce_scatter, where, MatmulReduceScatterCall(a, b, "sum", 0, "a group", dtype)),
    ]


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("way", WAYS)
def test_matmuls_of_float32_are_left_to_cublas(way: str) -> None:
    assert all("multiple of 16 bytes" in str(reason) for reason in calls(torch.float32))
    WAYS[way]()
    for reason in calls(torch.float32):
        assert isinstance(reason, str) and reason.startswith("TF32 is allowed")
    assert all("multiple of 16 bytes" in str(reason) for reason in calls(torch.bfloat16))
    with plan.forced("fused"):
        assert all("multiple of 16 bytes" in str(reason) for reason in calls(torch.float32))
    matmul.fp32_precision = "ieee"  # each call asks
    assert all("multiple of 16 bytes" in str(reason) for reason in calls(torch.float32))


@pytest.mark.parametrize("way", WAYS)
def test_the_pass_knows(way: str) -> None:
    big = (8192, 28672, 4096, 4)
    ops = ("all_gather_matmul", "matmul_reduce_scatter")

    def why(op: str, sizes: tuple[int, ...], dtype: torch.dtype, device_type: str) -> str | None:
        return why_not_profitable(FusionCandidate(op, *sizes, dtype, device_type))

    before = [why(op, big, torch.float32, "cuda") for op in ops]
    assert not any("TF32" in str(reason) for reason in before)
    WAYS[way]()
    for op in ops:
        assert "TF32 is allowed" in str(why(op, big, torch.float32, "cuda"))
        assert why(op, big, torch.bfloat16, "cuda") is None
        assert why(op, big, torch.float32, "cpu") is None
    # cuBLAS multiplies there anyway, or nothing is multiplied.
    assert why("matmul_all_reduce", (4096, 4096, 4096, 4), torch.float32, "cuda") is None
    assert why("all_reduce", (4096, 4096, 0, 4), torch.float32, "cuda") is None


def test_no_kernel_of_float32_takes_the_fast_path() -> None:
    """There nobody would ask for the setting."""
    layout = Layout(2, 0, 8)
    kept: dict[Any, Any] = {}

    class Prepared:
        prepared = kept

    for config, launcher in (
        (object.__new__(gather.AllGatherMatmulConfig), gather_on_cuda.gather_launcher),
        (object.__new__(scatter.MatmulReduceScatterConfig), scatter_on_cuda.scatter_launcher),
    ):
        choice: Any = KernelChoice("copy_engine", config, layout, profitable=True)
        assert launcher(choice, Prepared, None) is None  # type: ignore[operator]
