"""One rank alone: chunks are announced in the order in which ranks send them; on a GPU, its results are right."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from weft.kernels.all_gather_matmul.configs import GatherPushConfig, gather_push_layout
from weft.kernels.all_gather_matmul.cuda_kernel import SOURCE
from weft.kernels.device.gemm.gemm_tiles import Tile

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import alone_gather

PRINTS = """
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
#include GATHER
struct BufferWords { int world_size; };
struct WaitParams { int rank; };
struct Params {
    int m, n, k, bs, columns[4], raster_group, remote_raster_group, group;
    BufferWords buffer;
    WaitParams watch;
};
int main(int, char** given) {
    Params p{};
    p.m = std::atoi(given[1]), p.k = std::atoi(given[2]), p.group = std::atoi(given[3]);
    p.n = 8, p.bs = 1, p.columns[0] = 1, p.raster_group = p.remote_raster_group = 4, p.buffer.world_size = 4;
    const weft::GatherTileScheduler<Params> order(p);
    for (int i = 0; i < order.chunks; ++i) {
        const weft::GatherChunk<Params> chunk(p, order, i);
        if (chunk.inside) std::printf("%d\\n", chunk.flag);
    }
}
"""


@pytest.mark.parametrize(("block_m", "unit", "chunk_rows"), [(128, 512, 32), (64, 1024, 64), (128, 256, 16)])
def test_chunks_are_announced_in_the_order_in_which_ranks_send(
    block_m: int, unit: int, chunk_rows: int, tmp_path: Path
) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    defines = {
        "GATHER": f'"{SOURCE.parent / "tile_order.cuh"}"',
        "BM": block_m,
        "BN": 128,
        "SPLIT_K": 0,
        "K_CHUNK_COLUMNS": unit,
    }
    defines |= {"CHUNK_ROWS": chunk_rows, "CHUNK_COLUMNS": 64}
    (tmp_path / "prints.cpp").write_text(PRINTS)
    arguments = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-w",
            f"-I{SOURCE.parents[1] / 'device'}",
            *arguments,
            "prints.cpp",
            "-o",
            "prints",
        ],
        check=True,
        cwd=tmp_path,
    )
    choice = random.Random(block_m)
    for _ in range(20):
        m, k, group = choice.randrange(1, 700), 8 * choice.randrange(1, 400), choice.randrange(1, 5)
        config = GatherPushConfig(Tile(block_m, 128, 4, 0.4), 0, group, chunk_rows, k_chunk_columns=unit)
        ll_protocol = alone_gather.announcements(config, m, k, 4)
        command = [tmp_path / "prints", *map(str, (m, k, group))]
        sent = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        flags, due = zip(*ll_protocol, strict=True)
        assert list(flags) == [int(flag) for flag in sent], (m, k, group)
        assert max(flags) < gather_push_layout(m, k, 4, config).flags_per_rank
        assert list(due) == sorted(due) and due[0] > 0
        assert due[-1] == round(3 * m * k * 2 / 294)


def test_the_announcing_kernel_compiles() -> None:
    assert alone_gather.alone_program().cubin()


@pytest.mark.gpu
def test_a_rank_alone_computes_right_results() -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "bench" / "run.py"), "alone", "--ranks", "2"]
    command += ["--layers", "llama8b.q", "--m-sizes", "512", "--candidates", "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("llama8b.q")]
    assert [line.split(":")[0] for line in lines] == ["llama8b.qkv M=512", "llama8b.q_k_v M=512"], done.stdout
