"""Every variant of the Triton kernels, compiled for Hopper: the instructions, registers and memory it takes."""

from __future__ import annotations

import os
import re

import aot
import pytest
import torch
import triton
from weft.kernels.device.tile_table import Tile, tiles

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"
)
HALF, SINGLE = torch.bfloat16, torch.float32
VARIANTS = [
    *((tile, dtype, t) for dtype in (HALF, SINGLE) for tile in tiles(dtype) for t in (False, True)),
    (tiles(torch.float16)[0], torch.float16, True),
]


def name(value: object) -> str | None:
    return f"{value.block_m}x{value.block_n}" if isinstance(value, Tile) else None


def assert_fits(kernel: aot.Compiled, dtype: torch.dtype) -> None:
    print(f"{kernel.registers} registers, {kernel.shared} bytes of shared memory")
    # Without tensor cores ptxas keeps to 128 registers, for more blocks on an SM, and spills a few words.
    # Triton 3.6, with which everything was measured, spills nothing else; 3.7 a few words of the largest tile.
    bound = 32 if dtype == SINGLE else 0 if triton.__version__.startswith("3.6.") else 64
    assert kernel.spilled <= bound, f"{kernel.spilled} bytes a thread are spilled"
    assert kernel.shared <= aot.MAX_SHARED
    assert "cp.async.bulk.tensor" in kernel.ptx
    if dtype != SINGLE:
        assert "wgmma.mma_async" in kernel.ptx


def product_loops(kernel: aot.Compiled) -> list[str]:
    """The body of each loop that multiplies, from its head to its yield."""
    loops = re.findall(r"scf\.for(?:(?!scf\.for).)*?scf\.yield", kernel.ttgir, flags=re.S)
    return [loop for loop in loops if "warp_group_dot" in loop]


@pytest.mark.parametrize(("tile", "dtype", "transposed"), VARIANTS, ids=name)
def test_all_gather_matmul(tile: Tile, dtype: torch.dtype, transposed: bool) -> None:
    assert_fits(aot.all_gather_matmul(tile, dtype, transposed), dtype)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(("tile", "dtype", "transposed"), VARIANTS, ids=name)
def test_matmul_reduce_scatter(tile: Tile, dtype: torch.dtype, transposed: bool, world_size: int) -> None:
    assert_fits(aot.matmul_reduce_scatter(tile, dtype, transposed, world_size), dtype)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_mean_bias_and_residual_cost_nothing_that_does_not_fit(dtype: torch.dtype) -> None:
    assert_fits(aot.matmul_reduce_scatter(tiles(dtype)[0], dtype, True, more=True), dtype)


def test_one_main_loop_is_fed_by_whichever_descriptor() -> None:
    """Two loops would need two pipelines' worth of shared memory."""
    kernel = aot.all_gather_matmul(tiles(HALF)[0], HALF, True)
    (loop,) = product_loops(kernel)
    assert loop.count("async_tma_copy_global_to_local") == 2
    assert "elementwise_inline_asm" not in loop, "nothing is waited for inside the main loop"
    assert "gpu.barrier" not in loop


def test_both_loops_of_the_reduce_scatter_share_their_memory() -> None:
    tile = tiles(HALF)[0]
    kernel = aot.matmul_reduce_scatter(tile, HALF, True)
    assert len(product_loops(kernel)) == 2
    pipeline = tile.stages * tile.block_k * (tile.block_m + tile.block_n) * 2
    assert kernel.shared < 2 * pipeline


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_waits_and_posts_are_what_the_protocol_asks_for(op: str) -> None:
    ptx = getattr(aot, op)(tiles(HALF)[0], HALF, True).ptx
    assert "ld.acquire.sys.global.u32" in ptx
    assert "st.release.sys.global.u32" in ptx
    assert "fence.proxy.async" in ptx
    assert "globaltimer" in ptx
    assert "multimem" not in ptx
    if op == "matmul_reduce_scatter":
        # A flag is released behind stores that have arrived, not merely been read.
        order = (
            r"cp\.async\.bulk\.wait_group 0;",
            r"fence\.proxy\.async;",
            r"bar\.sync",
            r"st\.release\.sys",
        )
        assert re.search(".*?".join(order), ptx, flags=re.S) is not None
