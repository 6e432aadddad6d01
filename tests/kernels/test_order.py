"""The order of tiles and pieces of the CUDA products, compiled for the CPU: complete, and free of circular waits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cubins import KERNELS

HERE = Path(__file__).parent
GATHER = KERNELS / "all_gather_matmul" / "order.cuh"
SCATTER = KERNELS / "matmul_reduce_scatter" / "order.cuh"


def program(folder: Path, scatter: Path, block_m: int, world_size: int, split_k: bool = False) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    defines = {
        "GATHER": f'"{GATHER}"',
        "SCATTER": f'"{scatter}"',
        "BM": block_m,
        "BN": 192,
        "WORLD_SIZE": world_size,
        "PIECE_ROWS": 64,
        "PIECE_COLUMNS": 64,
        "UNIT_COLUMNS": 1024,
        "SPLIT_K": int(split_k),
    }
    out = folder / "order"
    arguments = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-w", *arguments, HERE / "order.cpp", "-o", out], check=True
    )
    return out


def run(program: Path) -> tuple[int, str]:
    done = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("block_m", "world_size"), [(128, 2), (128, 4), (64, 3), (64, 8)])
def test_orders_of_random_products(block_m: int, world_size: int, tmp_path: Path) -> None:
    assert run(program(tmp_path, SCATTER, block_m, world_size)) == (0, "")


@pytest.mark.parametrize("block_m", [64, 128])
def test_orders_of_shards_side_by_side(block_m: int, tmp_path: Path) -> None:
    assert run(program(tmp_path, SCATTER, block_m, 4, split_k=True)) == (0, "")


def test_an_order_with_circular_waits_is_found(tmp_path: Path) -> None:
    """Own tiles first: each rank would wait for what the others compute behind their waits."""
    text = SCATTER.read_text()
    own_last = "const int place = 2 * pair + block,"
    assert own_last in text
    folder = tmp_path / "op"
    folder.mkdir()
    walk = (KERNELS / "device" / "walk.cuh").as_posix()
    own_first = own_last.replace("block,", "block < all ? all - 1 - 2 * pair - block : 2 * pair + block,")
    own_first = f"const int all = own * WORLD_SIZE; {own_first}"
    broken = text.replace(own_last, own_first).replace("../device/walk.cuh", walk)
    (folder / "order.cuh").write_text(broken)
    code, said = run(program(tmp_path, folder / "order.cuh", 128, 4))
    assert code != 0 and "waited for before it is due" in said
