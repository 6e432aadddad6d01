"""The products of gemm.cuh compiled for sm_90a: registers, spills, and what lies between tensor instructions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cubins import ARGUMENTS, compile_ahead, disassembled, instructions_of, names_of, usage
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import cuda_kernel as all_gather_matmul
from weft.kernels.device.gemm.gemm_tiles import TILES, WIDEST, Tile
from weft.kernels.device.jit.program import Program, program_of
from weft.kernels.grouped_matmul import cuda_kernel as grouped_matmul
from weft.kernels.grouped_matmul.configs import GroupedConfig
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import cuda_kernel as matmul_reduce_scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue

# B as it lies in memory: rows contiguous, of whole boxes or not, or columns.
ORDERS = {
    "rows": torch.empty(256, 256, dtype=torch.bfloat16),
    "odd_rows": torch.empty(256, 264, dtype=torch.bfloat16),
    "columns": torch.empty(256, 256, dtype=torch.float16).t(),
}

ROUNDED = Epilogue(torch.bfloat16)


def gather(
    tile: Tile, order: str, split_k: bool = False, *, return_A: bool = False, exchanged: bool = False
) -> Program:
    config = replace(
        gather_configs.rank_gather_pushes(
            gather_configs.AllGatherMatmulProblem(1024, (1024,), 1024, 4, 132, split_k)
        )[0][1],
        tile=tile,
        exchanged=exchanged,
    )
    defines = all_gather_matmul.gather_defines([ORDERS[order]], config, return_A=return_A)
    return program_of(all_gather_matmul.SOURCE, **defines)


def scatter(
    tile: Tile, order: str, world_size: int, epilogue: Epilogue = ROUNDED, *, split_n: bool = False
) -> Program:
    config = replace(
        scatter_configs.rank_scatter_pushes(
            scatter_configs.MatmulReduceScatterProblem(1024, 1024, 1024, world_size, 132)
        )[0][1],
        tile=tile,
        split_n=split_n,
    )
    defines = matmul_reduce_scatter.scatter_defines(
        ORDERS[order], config, world_size, world_size // 2, epilogue
    )
    return program_of(matmul_reduce_scatter.SOURCE, **defines)


def grouped(tile: Tile, order: str, gated: bool = False) -> Program:
    b = ORDERS[order].expand(2, *ORDERS[order].shape)
    return grouped_matmul.grouped_program([b], GroupedConfig(tile, gated=gated))


def with_barriers(program: Program) -> Program:
    """As `make sanitize` compiles it."""
    return Program(program.path, defines={**program.defines, "RACECHECK": 1})


LARGEST, *OTHERS = TILES
PROGRAMS: dict[str, Program] = {
    **{f"all_gather_matmul-{order}": gather(LARGEST, order) for order in ORDERS},
    **{
        f"all_gather_matmul-{tile.block_m}x{tile.block_n}": gather(tile, list(ORDERS)[i % 3])
        for i, tile in enumerate((*OTHERS, WIDEST))
    },
    **{
        f"all_gather_matmul-split-{order}": gather(tile, order, split_k=True)
        for order, tile in zip(ORDERS, (LARGEST, *OTHERS[::-2]), strict=False)
    },
    **{
        f"all_gather_matmul-returned-{tile.block_m}x{tile.block_n}": gather(
            tile, list(ORDERS)[i % 3], split_k=i == 1, return_A=True
        )
        for i, tile in enumerate((*TILES, WIDEST))
    },
    **{
        f"matmul_reduce_scatter-{order}-{size}": scatter(LARGEST, order, size)
        for order, size in (("rows", 4), ("columns", 2), ("odd_rows", 8))
    },
    "matmul_reduce_scatter-float32": scatter(LARGEST, "rows", 4, Epilogue(torch.float32)),
    "matmul_reduce_scatter-bias": scatter(LARGEST, "rows", 4, replace(ROUNDED, bias=True)),
    "matmul_reduce_scatter-residual": scatter(LARGEST, "columns", 8, replace(ROUNDED, residual=True)),
    "matmul_reduce_scatter-racecheck": with_barriers(scatter(LARGEST, "rows", 4)),
    "matmul_reduce_scatter-split-2": scatter(LARGEST, "rows", 2, split_n=True),
    "matmul_reduce_scatter-split-4": scatter(LARGEST, "columns", 4, split_n=True),
    "matmul_reduce_scatter-to-all-2": scatter(LARGEST, "rows", 2, replace(ROUNDED, to_all=True)),
    "matmul_reduce_scatter-to-all-4": scatter(LARGEST, "columns", 4, replace(ROUNDED, to_all=True)),
    **{
        f"matmul_reduce_scatter-apart-{order}-{size}": scatter(
            tile, order, size, replace(ROUNDED, apart=True), split_n=True
        )
        for order, size, tile in (
            ("rows", 2, LARGEST),
            ("columns", 4, OTHERS[0]),
            ("odd_rows", 8, OTHERS[-1]),
        )
    },
    **{
        f"all_gather_matmul-exchanged-{order}": gather(
            tile, order, split_k=True, return_A=order == "columns", exchanged=True
        )
        for order, tile in zip(ORDERS, (LARGEST, WIDEST, OTHERS[-1]), strict=True)
    },
    "matmul_reduce_scatter-all-float32": scatter(
        LARGEST, "odd_rows", 8, Epilogue(torch.float32, average=True, bias=True, residual=True)
    ),
    **{
        f"grouped_matmul-{tile.block_m}x{tile.block_n}": grouped(tile, list(ORDERS)[i % 3])
        for i, tile in enumerate(TILES)
    },
    **{
        f"grouped_matmul-gated-{tile.block_m}x{tile.block_n}": grouped(tile, "columns", gated=True)
        for tile in TILES
        if tile.warpgroup_columns % 64 == 0
    },
    **{
        f"matmul_reduce_scatter-{tile.block_m}x{tile.block_n}": scatter(tile, list(ORDERS)[-i % 3], 4)
        for i, tile in enumerate(OTHERS)
    },
}


PARAMS = {
    "all_gather_matmul": all_gather_matmul._Params,
    "grouped_matmul": grouped_matmul._Params,
    "matmul_reduce_scatter": matmul_reduce_scatter._Params,
}


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    compile_ahead(request, PROGRAMS)


@pytest.fixture(scope="module")
def instructions(request: pytest.FixtureRequest) -> dict[str, str]:
    return instructions_of(request, PROGRAMS)


@pytest.mark.parametrize("name", names_of(PROGRAMS))
def test_registers_spills_and_the_size_of_the_argument(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    op = name.split("-")[0]
    ((kernel, numbers),) = usage(PROGRAMS[name], tmp_path)
    assert kernel == op
    record_property(f"{name}.registers", numbers["REG"])
    print(f"{name}: {numbers['REG']} registers")
    assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{name} spills or indexes an array: {numbers}"
    assert numbers["REG"] <= 65536 // 384, (
        "a block of 384 threads; its warpgroups trade registers when it runs"
    )
    # Tensor maps in the argument begin at a multiple of 64.
    assert numbers["CONSTANT[0]"] == -(-ARGUMENTS // 64) * 64 + ctypes.sizeof(PARAMS[op])


@pytest.mark.parametrize("name", names_of(PROGRAMS))
def test_matmuls_of_a_stage_run_one_behind_the_other(name: str, instructions: dict[str, str]) -> None:
    """Where the compiler loses track of the sums it waits for each product before the next: a fifth of the speed."""
    waits, products = (
        len(re.findall(what, instructions[name])) for what in (r"WARPGROUP\.DEPBAR", r"HGMMA\.")
    )
    of_a_stage = 8 if name.endswith(f"x{WIDEST.block_n}") else 4  # no instruction has more than 256 columns
    assert 0 < products == of_a_stage * waits, f"{waits} waits for {products} products"


@pytest.mark.parametrize("name", ["all_gather_matmul-rows", "matmul_reduce_scatter-rows-4"])
def test_machine_code(name: str, tmp_path: Path) -> None:
    code = disassembled(PROGRAMS[name], tmp_path)
    # Copies to both blocks of a cluster say MULTICAST as well; to several GPUs would be MULTIMEM.
    assert "MULTIMEM" not in code.upper()
    assert len(re.findall(r"HGMMA\.64x256x16", code)) == 4, "a stage's products, in one loop"
    loop = code[code.index("HGMMA") : code.rindex("HGMMA")]
    assert not re.search(r"MEMBAR|CCTL|LDL|STL", loop), "no fence and no spilled sum between products"
    # The loader issues one copy for A and one for B, without a loop over lanes around either.
    loads = code[code.index("UTMALDG.4D") : code.index("UTMALDG.3D")]
    assert "BRA" not in loads


def test_racecheck_finds_a_barrier_at_the_end_of_a_cluster(tmp_path: Path) -> None:
    def barriers(name: str) -> int:
        return disassembled(PROGRAMS[f"matmul_reduce_scatter-{name}"], tmp_path).count("UCGABAR_ARV")

    assert barriers("racecheck") == barriers("rows-4") + 1
