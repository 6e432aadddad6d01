"""One rank of a reduce-scatter alone: on the CPU it gets what its peers would send; on a GPU, its results are right."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import weft.kernels.device
from weft.kernels.matmul_reduce_scatter.cuda_kernel import SOURCE

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import alone
import alone_scatter

HERE, BENCH = Path(__file__).parent, Path(alone.__file__).parent
DEVICE = Path(weft.kernels.device.__file__).parent
CLUSTERS = 3
# Bytes in a turn of a fiber: so few that bursts wait for the pace, or so many that they are seen before they are whole.
SLOW, FAST = 1, 1000


def built(folder: Path, defines: dict[str, int], old: str = "", new: str = "") -> Path:
    """mirror.cpp around mirror.cu, in which ``new`` stands for ``old``."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    places = {
        DEVICE / name: folder / "device" / name for name in ("half.cuh", "pace.cuh", "walk.cuh", "wire.cuh")
    }
    places[SOURCE.with_name("order.cuh")] = folder / SOURCE.parent.name / "order.cuh"
    for file, place in places.items():
        place.parent.mkdir(exist_ok=True)
        place.write_text(file.read_text())
    (folder / "device" / "sync.cuh").touch()  # its stand-ins are in mirror.cpp
    text = (BENCH / "mirror.cu").read_text()
    assert old in text
    # Beside the headers, so that it includes these.
    mirror = folder / "device" / "mirror.cu"
    mirror.write_text(text.replace(old, new) if old else text)
    given = {**defines, "MIRROR": f'"{mirror}"', "PARAMS_BYTES": ctypes.sizeof(alone_scatter.Params)}
    options = ["-std=c++17", "-O1", "-w", *(f"-D{name}={value}" for name, value in given.items())]
    program = folder / "mirror"
    subprocess.run([compiler, *options, HERE / "mirror.cpp", "-o", program], check=True)
    return program


def said(program: Path, *arguments: int) -> str:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def tiles(world_size: int, split_n: int = 0, bm: int = 64, bn: int = 128) -> dict[str, int]:
    return {"BM": bm, "BN": bn, "WORLD_SIZE": world_size, "SPLIT_N": split_n}


@pytest.mark.parametrize(("world_size", "split_n"), [(2, 0), (3, 0), (4, 0), (4, 1)])
def test_a_rank_gets_what_its_peers_would_send(world_size: int, split_n: int, tmp_path: Path) -> None:
    program = built(tmp_path, tiles(world_size, split_n))
    choice = random.Random(world_size)
    for seed in range(6):
        m, n, batches = (
            choice.randrange(1, 300),
            8 * choice.randrange(1, 60),
            choice.randrange(1, 3 - split_n),
        )
        given = m, n, batches, choice.randrange(1, 5), CLUSTERS
        for rate in (SLOW, FAST):
            assert said(program, *given, 1, rate, seed) == "", given


def test_waits_for_what_is_not_sent_are_bounded(tmp_path: Path) -> None:
    assert said(built(tmp_path, tiles(4)), 200, 256, 1, 2, CLUSTERS, 0, FAST, 0) == ""


@pytest.mark.parametrize(
    ("old", "new", "rate", "what"),
    [
        ("WORLD_SIZE - 1 - t.dst", "t.dst - 1", FAST, "is another"),
        ("if (!__any_sync(~0u, missing)) break;", "break;", FAST, "is another"),
        ("p.clusters ? warp / 4", "p.clusters - 1 ? warp / 4", FAST, "is another"),
        ("pace.wait();", "", SLOW, "too fast"),
    ],
    ids=["other-peer", "burst-not-awaited", "warps-not-followed", "pace-not-kept"],
)
def test_mistakes_are_found(old: str, new: str, rate: int, what: str, tmp_path: Path) -> None:
    assert what in said(built(tmp_path, tiles(4), old, new), 200, 256, 1, 2, CLUSTERS, 1, rate, 0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("bm", "bn"), [(128, 256), (128, 96), (64, 128)])
def test_the_mirroring_kernel_compiles(world_size: int, bm: int, bn: int) -> None:
    assert alone_scatter.program(tuple(tiles(world_size, bm=bm, bn=bn).items())).cubin()


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_alone_computes_right_results(world_size: int) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world_size}",
    ]
    command += [str(alone.__file__), "--ops", "matmul_reduce_scatter", "--layers", "llama8b.o"]
    command += ["--m-sizes", "512,1024", "--candidates", "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("llama8b.o")]
    assert [line.split(":")[0] for line in lines] == ["llama8b.o M=512", "llama8b.o M=1024"], done.stdout
