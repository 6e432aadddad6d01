"""fused_matmul_reduce_scatter of the last dimension on CUDA: columns of B go to ranks, right to the last bit.

Where operands are small whole numbers every rounding on the way is exact, in any order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from algorithms import choose_anew, needs_gemm
from opcommon import BOUND, check, gather, gathered, matrix, poison, whole, world
from ranks import on_ranks
from weft import symm_mem
from weft.fused_ops import fused_matmul_reduce_scatter, last_plan
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.device.gemm.gemm_tiles import TILES, Tile
from weft.kernels.matmul_reduce_scatter import configs

pytestmark = pytest.mark.gpu

SHAPES = [  # A's dimensions, columns of a rank
    ((1, 8), 8),
    ((101, 72), 40),
    ((257, 1000), 520),
    ((3, 21, 520), 64),
    ((301, 2056), 1544),
    ((1023, 504), 768),
    ((129, 64), 2048),
    ((2, 2, 200), 264),
]


def exact(
    shape: tuple[int, ...], n: int, dtype: torch.dtype, transposed: bool, algorithm: str, added: bool = False
) -> None:
    rank, size = world().rank(), world().size()
    A, B = whole(*shape, dtype=dtype), matrix(shape[-1], size * n, dtype, transposed)
    terms: dict[str, Any] = {}
    if added:
        terms = {"bias": whole(n, dtype=dtype), "residual": whole(*shape[:-1], n, dtype=dtype)}
    total = gathered(A.float() @ B.float()).sum(0).chunk(size, -1)[rank]
    with forced(algorithm):
        out = fused_matmul_reduce_scatter(A, B, "sum", -1, world(), **terms)
        assert last_plan().algorithm == algorithm, last_plan()
    assert out.is_contiguous()
    what = f"{shape} {n} {dtype} {transposed} {algorithm} {added}"
    assert torch.equal(out, sum(terms.values(), start=total).to(dtype)), what


@needs_gemm
@on_ranks([2, pytest.param(4, marks=pytest.mark.gpu(4))], device="cuda", fresh=True)
def test_every_tile(rank: int, world_size: int) -> None:
    ranked = configs.rank_scatter_pushes
    for i, tile in enumerate(TILES):

        def only(problem: Any, tile: Tile = tile) -> list[tuple[float, Any]]:
            (us, config), *_ = ranked(problem)
            return [(us, replace(config, tile=tile))]

        choose_anew()
        symm_mem.reset()  # the kernels are made anew
        with mock.patch.object(configs, "rank_scatter_pushes", only):
            for shape, n in SHAPES:
                poison(rank)
                exact(shape, n, (torch.bfloat16, torch.float16)[i % 3 == 0], i % 2 == 0, "push")


@on_ranks(2, device="cuda")
def test_what_no_kernel_takes(rank: int, world_size: int) -> None:
    A, B = torch.randn(130, 64).bfloat16(), torch.randn(64, world_size * 12).bfloat16()
    out = fused_matmul_reduce_scatter(A, B, "sum", 1, world())
    assert last_plan().algorithm == "unfused" and "rows of 12 x" in last_plan().reason, last_plan()
    parts = [(a @ b).chunk(world_size, 1)[rank] for a, b in zip(gather(A), gather(B), strict=True)]
    check("rows of 12", out, sum(parts), BOUND[A.dtype], parts)


@pytest.mark.parametrize("algorithm", ["one_shot", "copy_engine"])
@on_ranks([2, 4], device="cuda")
def test_columns_of_float32(rank: int, world_size: int, algorithm: str) -> None:
    for i, (shape, n) in enumerate(SHAPES):
        exact(shape, n, torch.float32, i % 2 == 0, algorithm, added=i % 3 == 0)
