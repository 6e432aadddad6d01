"""The order of tiles and chunks of the CUDA products, compiled for the CPU: complete, and free of circular waits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from fibers import DEVICE

HERE = Path(__file__).parent
KERNELS = DEVICE.parent
GATHER = KERNELS / "all_gather_matmul" / "tile_order.cuh"
SCATTER = KERNELS / "matmul_reduce_scatter" / "tile_order.cuh"


def program(folder: Path, scatter: Path, block_m: int, world_size: int, *, split: bool = False) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    defines = {
        "GATHER": f'"{GATHER}"',
        "SCATTER": f'"{scatter}"',
        "BM": block_m,
        "BN": 192,
        "WORLD_SIZE": world_size,
        "CHUNK_ROWS": 64,
        "CHUNK_COLUMNS": 64,
        "K_CHUNK_COLUMNS": 1024,
        "SPLIT_K": int(split),
        "SPLIT_N": int(split),
    }
    out = folder / "order"
    arguments = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-w", f"-I{DEVICE}", *arguments, HERE / "tile_order.cpp", "-o", out],
        check=True,
    )
    return out


def run(program: Path) -> tuple[int, str]:
    done = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("block_m", "world_size"), [(128, 2), (128, 4), (64, 3), (64, 8)])
def test_orders_of_random_matmuls(block_m: int, world_size: int, tmp_path: Path) -> None:
    assert run(program(tmp_path, SCATTER, block_m, world_size)) == (0, "")


@pytest.mark.parametrize(("block_m", "world_size"), [(64, 4), (128, 4), (128, 2), (64, 3), (128, 8)])
def test_orders_of_the_last_dimension(block_m: int, world_size: int, tmp_path: Path) -> None:
    assert run(program(tmp_path, SCATTER, block_m, world_size, split=True)) == (0, "")


@pytest.mark.parametrize("split", [False, True])
def test_an_order_with_circular_waits_is_found(split: bool, tmp_path: Path) -> None:
    """Own tiles first: each rank would wait for what the others compute after their waits."""
    text = SCATTER.read_text()
    own_last = "const int place = (2 * pair + block) / ENTRY_ROWS,"
    assert own_last in text
    folder = tmp_path / "op"
    folder.mkdir()
    own_first = "const int all = own * WORLD_SIZE, there = (2 * pair + block) / ENTRY_ROWS;"
    own_first += "const int place = there < all ? all - 1 - there : there,"
    broken = text.replace(own_last, own_first)
    (folder / "tile_order.cuh").write_text(broken)
    code, said = run(program(tmp_path, folder / "tile_order.cuh", 128, 4, split=split))
    assert code != 0 and "waited for before it is due" in said
