"""A rank of a reduce-scatter alone: what it sends comes to it as its peers' parts; on a GPU, its results are right."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / "bench"), str(Path(__file__).parents[1] / "verification")]

import alone_scatter
from fibers import PATIENT
from matmul_ops import Scatter
from matmuls import SMALL, WIDE
from weft.kernels.device.gemm.gemm_tiles import TILES
from weft.kernels.device.jit.program import Program
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterPushConfig
from weft.kernels.matmul_reduce_scatter.cuda_kernel import scatter_defines


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "op",
    [
        Scatter(2, 147, 136, 72, SMALL, blocks=2),
        Scatter(3, 67, 40, 136, WIDE, blocks=2),
        Scatter(4, 65, 136, 72, SMALL, raster_group=2),
    ],
    ids=["2", "3", "4"],
)
def test_a_rank_alone_sums_its_own_matmuls(op: Scatter, monkeypatch: pytest.MonkeyPatch) -> None:
    library = op.compiled((alone_scatter.AT_PEER, alone_scatter.AT_HOME)).result()
    ranks = op.prepare(monkeypatch, library, (1, 2000))
    op.launch(0, PATIENT)
    (a, b), (out, want) = op.kept[0], op.wanted[0]
    want[: op.m] = (a[0].float() @ b.float()).sum(0)
    ranks.run_alone(0)
    assert not ranks.records.any() and not ranks.strays
    assert torch.equal(out, want)
    buffers = ranks.memory[:, ranks.layout.buffer(0) : ranks.layout.staging]
    assert not buffers.any(), "something was sent to others, or not taken"


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_kernel_of_a_rank_alone_compiles(world_size: int) -> None:
    b = torch.empty(256, 256, dtype=torch.bfloat16)
    config, epilogue = ScatterPushConfig(TILES[0], 2), Epilogue(torch.bfloat16)
    given = scatter_defines(b, config, world_size, 0, epilogue)
    assert Program(alone_scatter.source(world_size), defines=given).cubin()


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_alone_computes_right_results(world_size: int) -> None:
    run = Path(__file__).parents[2] / "bench" / "run.py"
    command = [sys.executable, str(run), "alone", "--ranks", str(world_size)]
    command += ["--ops", "matmul_reduce_scatter", "--layers", "llama8b.o"]
    command += ["--m-sizes", "512,1024", "--candidates", "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("llama8b.o")]
    assert [line.split(":")[0] for line in lines] == ["llama8b.o M=512", "llama8b.o M=1024"], done.stdout
