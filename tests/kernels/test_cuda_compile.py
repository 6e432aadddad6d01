"""Every .cu compiled for sm_90a: registers, spills, and what the machine code holds. No GPU is needed."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
import weft.kernels.device
from weft.kernels.all_gather_matmul import cuda_kernel as all_gather_matmul
from weft.kernels.all_gather_matmul.configs import choose_push
from weft.kernels.all_reduce import cuda_kernel
from weft.kernels.device import gate
from weft.kernels.device.gemm_tiles import MOST_SHARED, TILES, Tile
from weft.kernels.device.program import compile_cubin
from weft.kernels.matmul_reduce_scatter import cuda_kernel as matmul_reduce_scatter
from weft.kernels.matmul_reduce_scatter.configs import choose_bulk

KERNELS = Path(weft.kernels.device.__file__).parent.parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

ALL_REDUCE = [
    (world_size, dtype) for world_size in (2, 3, 4, 8) for dtype in ("float32", "bfloat16", "float16")
]
# B as it lies in memory, rows contiguous or columns; one dtype each, because only an instruction's name differs.
ORDERS = {
    "rows": torch.empty(256, 256, dtype=torch.bfloat16),
    "columns": torch.empty(256, 256, dtype=torch.float16).t(),
}


def gather_defines(tile: Tile, order: str) -> dict[str, str | int]:
    config = replace(choose_push(1024, [1024], 1024, 4, 132), tile=tile)
    return dict(all_gather_matmul.defines([ORDERS[order]], config))


def scatter_defines(tile: Tile, order: str, world_size: int) -> dict[str, str | int]:
    config = choose_bulk(1024, 1024, 1024, world_size, 132)
    rounds = 1 if tile.shared(2 * tile.part_bytes) <= MOST_SHARED else 2
    return dict(
        matmul_reduce_scatter.defines(ORDERS[order], replace(config, tile=tile, rounds=rounds), world_size)
    )


GEMMS: dict[str, tuple[Path, dict[str, str | int]]] = {
    **{
        f"all_gather_matmul-{tile.block_m}x{tile.block_n}-{order}": (
            KERNELS / "all_gather_matmul" / "kernel.cu",
            gather_defines(tile, order),
        )
        for i, tile in enumerate(TILES)
        for order in (ORDERS if i == 0 else list(ORDERS)[i % 2 :][:1])
    },
    **{
        f"matmul_reduce_scatter-{tile.block_m}x{tile.block_n}-{order}-{world_size}": (
            KERNELS / "matmul_reduce_scatter" / "kernel.cu",
            scatter_defines(tile, order, world_size),
        )
        for i, tile in enumerate(TILES)
        for order, world_size in ((("rows", 4), ("columns", 2), ("rows", 8)) if i == 0 else (("columns", 4),))
    },
}
PROGRAMS: dict[str, tuple[Path, dict[str, str | int]]] = {
    **GEMMS,
    "gate": (KERNELS / "device" / "gate.cu", {}),
    **{
        f"all_reduce-{world_size}-{dtype}": (cuda_kernel.SOURCE, {"WORLD_SIZE": world_size, "DTYPE": dtype})
        for world_size, dtype in ALL_REDUCE
    },
}


@cache
def cubin(name: str) -> bytes:
    path, defines = PROGRAMS[name]
    return compile_cubin(path, "sm_90a", defines)


def usage(cubin: bytes, folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """(kernel, {"REG": .., "STACK": .., "LOCAL": .., "CONSTANT[0]": ..}) for each kernel of a cubin."""
    file = folder / "program.cubin"
    file.write_bytes(cubin)
    text = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", file], check=True, capture_output=True, text=True
    ).stdout
    for name, numbers in re.findall(r"Function (\w+):\s*\n\s*(.*)", text):
        yield name, {key: int(value) for key, value in re.findall(r"(\S+):(\d+)", numbers)}


def test_every_cu_file_is_compiled_here() -> None:
    assert {path for path, _ in PROGRAMS.values()} == set(KERNELS.rglob("*.cu"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_registers_and_spills(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = dict(usage(cubin(name), tmp_path))
    kernels = {"gate": {"gate", "leave"}, "all_reduce": {"one_shot", "two_shot"}}
    assert set(found) == kernels.get(name.split("-")[0], {name.split("-")[0]})
    for kernel, numbers in found.items():
        record_property(f"{name}.{kernel}.registers", numbers["REG"])
        print(f"{name} {kernel}: {numbers['REG']} registers")
        assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{kernel} spills or indexes an array: {numbers}"
        if name in GEMMS:  # one block of 384 threads; its warpgroups trade registers when it runs
            assert numbers["REG"] <= 65536 // 384
        else:  # a block of 512 threads fits twice on a multiprocessor with 64, once with 128
            assert numbers["REG"] <= (64 if "-8-" not in name else 104)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_argument_has_the_size_that_the_launcher_packs(name: str, tmp_path: Path) -> None:
    launchers = {"gate": gate, "all_reduce": cuda_kernel, "all_gather_matmul": all_gather_matmul}
    params = launchers.get(name.split("-")[0], matmul_reduce_scatter)._Params
    before = 528  # constant bank 0 of sm_90: kernel arguments begin here, tensor maps at a multiple of 64
    before = -(-before // 64) * 64 if name in GEMMS else before
    for kernel, numbers in usage(cubin(name), tmp_path):
        assert numbers["CONSTANT[0]"] == before + ctypes.sizeof(params), kernel


@pytest.mark.parametrize("name", [name for name in GEMMS if "128x256" in name])
def test_machine_code_of_products(name: str, tmp_path: Path) -> None:
    file = tmp_path / "program.cubin"
    file.write_bytes(cubin(name))
    code = subprocess.run([TOOLS / "nvdisasm", "-c", file], check=True, capture_output=True, text=True).stdout
    assert "MULTIMEM" not in code.upper()
    assert len(re.findall(r"HGMMA\.64x256x16", code)) == 4, "a stage's products, in one loop"
    # What lies between them decides the speed: no fence, no wait for all of memory, no spilled sums.
    loop = code[code.index("HGMMA") : code.rindex("HGMMA")]
    assert not re.search(r"MEMBAR|CCTL|LDL|STL|WARPSYNC", loop)


@pytest.mark.parametrize("name", ["all_reduce-4-bfloat16", "gate"])
def test_machine_code(name: str, tmp_path: Path) -> None:
    file = tmp_path / "program.cubin"
    file.write_bytes(cubin(name))
    code = subprocess.run([TOOLS / "nvdisasm", "-c", file], check=True, capture_output=True, text=True).stdout
    assert "MULTIMEM" not in code.upper()
    if name == "gate":
        assert re.search(r"LD\S*\.E\.STRONG\.SYS", code), "the flag is acquired at system scope"
    else:
        # To and from three peers, once in one_shot and twice in two_shot, 16 bytes at a time.
        assert len(re.findall(r"ST\S*\.E\.128\.STRONG\.SYS", code)) >= 9
        assert len(re.findall(r"LD\S*\.E\.128\.STRONG\.SYS", code)) >= 9


def test_the_launchers_know_the_same_dtypes_as_the_source() -> None:
    assert {dtype for _, dtype in ALL_REDUCE} == set(cuda_kernel.DTYPES.values())
    assert set(cuda_kernel.DTYPES) == {torch.float32, torch.bfloat16, torch.float16}
