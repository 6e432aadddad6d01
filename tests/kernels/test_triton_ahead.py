"""Triton's kernels are compiled ahead as their first launch wants them: for the same types, and numbers of that kind.

There is no GPU: Triton compiles for Hopper, and launches nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.all_gather_matmul.triton_kernel import (
    TritonAllGatherMatmul,
    all_gather_matmul_kernel,
    triton_gather_program,
)
from weft.kernels.device.jit.ahead import ProgramCounts, program_counts
from weft.kernels.device.jit.launch import Launch, TritonProgram
from weft.kernels.matmul_reduce_scatter import configs as scatter
from weft.kernels.matmul_reduce_scatter.triton_kernel import (
    TritonMatmulReduceScatter,
    matmul_reduce_scatter_kernel,
    triton_scatter_program,
)
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.layout import Layout

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="nothing is compiled in the interpreter; and a GPU that is there is asked itself",
)
M, K, N, SIZE = 256, 128, 192, 2


class Hopper(cuda_state.CudaState):
    """It compiles."""

    def make_current(self, device: torch.device) -> Any:
        return nullcontext()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    there = Hopper()
    monkeypatch.setattr(cuda_state, "state", there)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", there)
    for kernel in (all_gather_matmul_kernel, matmul_reduce_scatter_kernel):
        kernel.device_caches.clear()
    yield
    for kernel in (all_gather_matmul_kernel, matmul_reduce_scatter_kernel):
        kernel.device_caches.clear()


def launched(op: str, workspace: Any, rank: int) -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    if op == "all_gather_matmul":
        config = gather.choose_all_gather_matmul(M, N, K, SIZE, torch.float32, 132)
        workspace.layout = gather.copied_gather_layout(M, K, torch.float32, SIZE, config).joined(
            workspace.layout
        )
        kernel = TritonAllGatherMatmul(workspace, a, b, config, num_sms=132)
        kernel.launch(0, a, b, torch.empty(SIZE, M, N), final=True, timeout_ns=3)
        return
    problem = scatter.MatmulReduceScatterProblem(M, N, K, SIZE, 132)
    of_scatter = scatter.choose_matmul_reduce_scatter(problem, torch.float32)
    workspace.layout = scatter.tiled_scatter_layout(of_scatter, problem, torch.float32).joined(
        workspace.layout
    )
    epilogue = scatter.Epilogue(torch.float32, residual=True)
    parts = a.expand(1, SIZE, M, K).contiguous()
    made = TritonMatmulReduceScatter(workspace, parts, b, of_scatter, epilogue, num_sms=132)
    made.launch(0, parts, b, torch.empty(1, M, N), torch.empty(1, M, N), timeout_ns=3)


def program_of(op: str, rank: int) -> TritonProgram:
    """What ``launched`` compiles, known without a workspace."""
    a, b = torch.empty(M, K), torch.empty(K, N)
    if op == "all_gather_matmul":
        config = gather.choose_all_gather_matmul(M, N, K, SIZE, torch.float32, 132)
        return triton_gather_program(a, b, config, SIZE, final=True)
    problem = scatter.MatmulReduceScatterProblem(M, N, K, SIZE, 132)
    of_scatter = scatter.choose_matmul_reduce_scatter(problem, torch.float32)
    epilogue = scatter.Epilogue(torch.float32, residual=True)
    return triton_scatter_program(torch.empty(1, SIZE, M, K), b, of_scatter, epilogue, rank)


def on_heap(rank: int, layout: Layout) -> Any:
    """As on a GPU of 80 GiB, which has made larger calls."""
    words = torch.zeros(64, dtype=torch.int32)
    return SimpleNamespace(
        rank=rank,
        world_size=SIZE,
        span=80 << 30,
        words=words,
        fault=SimpleNamespace(record=1 << 40, words=words),
        layout=Layout(SIZE, 64 * 37, 64 << 20).joined(layout),
        buffer=lambda rank, buffer, shape, dtype: torch.zeros(shape, dtype=dtype),
    )


@pytest.mark.parametrize(  # what gathers knows no rank
    ("op", "rank"), [("all_gather_matmul", 0), ("matmul_reduce_scatter", 0), ("matmul_reduce_scatter", 1)]
)
def test_the_first_launch_finds_what_was_compiled(
    op: str, rank: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(op, rank)
    before = program_counts()
    program.compile()
    assert program_counts() - before == ProgramCounts(at_calls=1)  # here it is no thread in the background
    program.compile()
    taken: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launch, "__call__", lambda *given: taken.append(given))
    launched(op, on_heap(rank, Layout(SIZE, 64, 1 << 20)), rank)
    ((launch, _, *arguments),) = taken
    assert launch._compiled(*arguments) is not None
    assert program_counts() - before == ProgramCounts(at_calls=1)
    # What is told apart is counted: rows of another kind.
    described, tensors, (first, second, *numbers) = arguments
    assert launch._compiled(described, tensors, (first, second + 1, *numbers)) is not None
    assert program_counts() - before == ProgramCounts(at_calls=2)


def test_types_are_enough() -> None:
    """Fake tensors have no memory."""
    with FakeTensorMode():
        assert str(program_of("all_gather_matmul", 0)).partition(" with ")[0] == "all_gather_matmul_kernel"
