"""The kernels of fp8 operands compiled for sm_90a: registers, spills, and what lies between tensor instructions."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cubins import ARGUMENTS, compile_ahead, disassembled, instructions_of, names_of, usage
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import cuda_kernel as all_gather_matmul
from weft.kernels.all_gather_matmul import scaled
from weft.kernels.device.gemm.gemm_tiles import TILES, Tile
from weft.kernels.device.gemm.scaling import ScaledProducts, ScaleKind
from weft.kernels.device.jit.program import Program, program_of
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import cuda_kernel as matmul_reduce_scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue

TENSOR, ROWS, BLOCKS = ScaleKind
E4M3, E5M2, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
BY_SIZE = {(tile.block_m, tile.block_n): tile for tile in TILES}
B = torch.empty(256, 256, dtype=torch.bfloat16, device="meta").t()


def products(
    kind: ScaleKind,
    *,
    promote: bool,
    types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out: torch.dtype = torch.bfloat16,
) -> ScaledProducts:
    return ScaledProducts(types, kind, out, promote, travels=kind is not TENSOR)


def gather_of(tile: Tile, what: ScaledProducts, *, split_k: bool = False, return_A: bool = False) -> Program:
    problem = gather_configs.AllGatherMatmulProblem(1024, (1024,), 1024, 4, 132, split_k, scaled=what)
    config = replace(gather_configs.rank_gather_pushes(problem)[0][1], tile=tile)
    defines = all_gather_matmul.gather_defines([B.to(what.pairs)], config, return_A=return_A)
    return program_of(all_gather_matmul.SOURCE, **defines)


def scatter_of(tile: Tile, size: int, what: ScaledProducts, *, split_n: bool = False) -> Program:
    problem = scatter_configs.MatmulReduceScatterProblem(1024, 1024, 1024, size, 132, scaled=what)
    config = replace(scatter_configs.rank_scatter_pushes(problem)[0][1], tile=tile, split_n=split_n)
    epilogue = Epilogue(what.out_dtype)
    defines = matmul_reduce_scatter.scatter_defines(B.to(what.pairs), config, size, size // 2, epilogue)
    return program_of(matmul_reduce_scatter.SOURCE, **defines)


def of_tiles(what: ScaledProducts) -> list[Tile]:
    return [tile for tile in TILES if what.takes_columns(tile.warpgroup_columns)]


FAST, EXACT, OF_BLOCKS = (
    products(ROWS, promote=False),
    products(ROWS, promote=True),
    products(BLOCKS, promote=True),
)
# Of both ops the largest tile of each kind; the others by turns.
PROGRAMS: dict[str, Program] = {
    **{
        f"all_gather_matmul-{kind}-{tile.block_m}x{tile.block_n}": gather_of(tile, what, return_A=i % 3 == 1)
        for j, (kind, what) in enumerate((("fast", FAST), ("exact", EXACT), ("blocks", OF_BLOCKS)))
        for i, tile in enumerate(of_tiles(what))
        if i == 0 or (i + j) % 2
    },
    **{
        f"matmul_reduce_scatter-{kind}-{tile.block_m}x{tile.block_n}": scatter_of(tile, size, what)
        for j, (kind, what, size) in enumerate(
            (("fast", FAST, 2), ("exact", EXACT, 4), ("blocks", OF_BLOCKS, 2))
        )
        for i, tile in enumerate(of_tiles(what))
        if (i + j) % 2 == 0 or i == 0
    },
    "all_gather_matmul-e5m2-split": gather_of(
        BY_SIZE[128, 128], products(TENSOR, promote=True, types=(E5M2, E4M3), out=torch.float16), split_k=True
    ),
    "all_gather_matmul-float32": gather_of(
        BY_SIZE[128, 256], products(ROWS, promote=False, types=(E4M3, E5M2), out=F32), return_A=True
    ),
    "matmul_reduce_scatter-tensor": scatter_of(
        BY_SIZE[128, 256], 8, products(TENSOR, promote=False, types=(E5M2, E4M3), out=torch.float16)
    ),
    "matmul_reduce_scatter-float32": scatter_of(BY_SIZE[128, 192], 2, products(ROWS, promote=False, out=F32)),
    "matmul_reduce_scatter-float32-tensor": scatter_of(
        BY_SIZE[128, 160], 4, products(TENSOR, promote=False, out=F32)
    ),
    "matmul_reduce_scatter-float32-blocks": scatter_of(
        BY_SIZE[128, 128], 8, products(BLOCKS, promote=True, out=F32), split_n=True
    ),
    "matmul_reduce_scatter-split": scatter_of(BY_SIZE[128, 128], 2, OF_BLOCKS, split_n=True),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    compile_ahead(request, PROGRAMS)


@pytest.fixture(scope="module")
def instructions(request: pytest.FixtureRequest) -> dict[str, str]:
    return instructions_of(request, PROGRAMS)


@pytest.mark.parametrize("name", names_of(PROGRAMS))
def test_registers_spills_and_products(name: str, tmp_path: Path, instructions: dict[str, str]) -> None:
    op = name.split("-")[0]
    params = scaled._ScaledParams if op == "all_gather_matmul" else matmul_reduce_scatter._ScaledParams
    ((kernel, numbers),) = usage(PROGRAMS[name], tmp_path)
    assert kernel == op
    assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{name} spills or indexes an array: {numbers}"
    assert numbers["REG"] <= 65536 // 384
    # Tensor maps in the argument begin at a multiple of 64.
    assert numbers["CONSTANT[0]"] == -(-ARGUMENTS // 64) * 64 + ctypes.sizeof(params)
    code = instructions[name]
    waits, found = (len(re.findall(what, code)) for what in (r"WARPGROUP\.DEPBAR", r"QGMMA\."))
    assert 0 < found == 4 * waits, (
        f"{waits} waits for {found} products: the compiler has lost track of the sums"
    )
    assert not re.search(r"HGMMA\.|MULTIMEM", code.upper())


def test_types_are_those_of_A_and_B(tmp_path: Path) -> None:
    code = disassembled(PROGRAMS["all_gather_matmul-e5m2-split"], tmp_path)
    assert re.search(r"QGMMA\.64x128x32\.F32\.E5M2\.E4M3", code), re.findall(r"QGMMA\S+", code)[:4]
    code = disassembled(PROGRAMS["all_gather_matmul-fast-128x256"], tmp_path)
    assert re.search(r"QGMMA\.64x256x32\.F32\.E4M3\.E4M3", code), re.findall(r"QGMMA\S+", code)[:4]


def test_the_exchange_of_rows_and_scales(tmp_path: Path) -> None:
    program = scaled.AllGatherScaledMatmulOneShot.program(4, 1)
    ((kernel, numbers),) = usage(program, tmp_path)
    assert kernel == "all_gather_one_shot" and numbers["STACK"] == numbers["LOCAL"] == 0
    assert numbers["CONSTANT[0]"] == ARGUMENTS + ctypes.sizeof(scaled._OneShotParams)
