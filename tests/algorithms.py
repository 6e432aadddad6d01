"""The kernels of both products of 16 bits, for tests that want them all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import on_cuda as gather_on_cuda
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import on_cuda as scatter_on_cuda

ALGORITHMS = ("push", "one_shot")  # as plan.forced takes them
# With WEFT_ARCH kernels and choices are those of a GPU without wgmma.
_HAS_GEMM = "WEFT_ARCH" not in os.environ
EVERY = (*ALGORITHMS[not _HAS_GEMM :], "copy_engine")
OVERLAPS = "push" if _HAS_GEMM else "copy_engine"  # where one shot cannot be had
needs_gemm = pytest.mark.skipif(not _HAS_GEMM, reason="a kernel with wgmma, which WEFT_ARCH has not")

#: Where each product chooses its exchange in one shot.
ONE_SHOT = ((gather_configs, "choose_one_shot_gather"), (scatter_configs, "choose_one_shot_scatter"))


def choose_anew() -> None:
    """Forget which kernel runs what."""
    gather_on_cuda.choose_gather_kernel.clear()
    scatter_on_cuda.choose_scatter_kernel.clear()


@contextmanager
def mixing() -> Iterator[None]:
    """Inside the body about half of the problems that are small enough for one shot push.

    By their sizes: so all ranks do it alike, and nothing is switched from call to call.
    """
    with ExitStack() as stack:
        for (configs, name), columns in zip(ONE_SHOT, ("k", "n"), strict=True):
            choose = getattr(configs, name)

            def some(problem: Any, columns: str = columns, choose: Any = choose) -> Any:
                return None if getattr(problem, columns) // 64 % 2 else choose(problem)

            stack.enter_context(mock.patch.object(configs, name, some))
        yield
