"""On GPUs: a compiled model's first run compiles no kernel, nor does that of a process that finds the graphs kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from graphs import gather, scatter
from opcommon import BOUND, check
from ranks import run_ranks
from torch import Tensor
from weft.fused_ops.passes import FusionPass

DIM, HIDDEN = 1024, 1536


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + scatter(torch.relu(gather(x) @ up) @ down)


def two_layers(x: Tensor, *weights: Tensor) -> Tensor:
    return layer(layer(x, *weights[:2]), *weights[2:])


def first_run(rank: int, size: int, rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int, int]:
    """Forward and backward, the first of the process."""
    fusion = FusionPass(fuse="always")
    shapes = (rows // size, DIM), *((DIM, HIDDEN), (HIDDEN, DIM)) * 2
    given = [(torch.randn(s) / 32).to(dtype).requires_grad_() for s in shapes]
    model = torch.compile(two_layers, options=fusion.options, dynamic=False)
    y = model(*given)
    y.backward(torch.randn_like(y))
    torch.cuda.synchronize()
    exact = [t.detach().double().requires_grad_() for t in given]
    check("first run", y, two_layers(*exact), 6 * BOUND[dtype])
    report = fusion.report()
    counts = report.programs
    assert report.questions.count == report.questions.fused == 2, report
    return report.runs.graphs, report.fused, counts.ahead, counts.at_calls, counts.kept, counts.failed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "dtype"), [(128, torch.bfloat16), (4096, torch.bfloat16), (4096, torch.float32)]
)
def test_the_first_run_compiles_nothing(rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "WEFT_CACHE_DIR"
    folders = {name: str(tmp_path / name) for name in names}

    def ran() -> list[tuple[int, ...]]:
        return run_ranks(first_run, 2, rows, dtype, device="cuda", env=folders, fresh=True)

    for graphs, fused, ahead, at_calls, _, failed in ran():
        assert graphs == 2 and fused >= 4
        assert ahead > 0 and (at_calls, failed) == (0, 0)
    for cubins in (True, False):  # graphs that Inductor has kept, with the cubins, and without
        if not cubins and dtype == torch.bfloat16:  # all that a layer of float32 compiles are Triton's
            shutil.rmtree(tmp_path / "WEFT_CACHE_DIR")
        for graphs, _fused, ahead, at_calls, kept, failed in ran():
            assert (graphs, at_calls, failed) == (0, 0, 0)
            assert ahead + kept > 0
            assert dtype != torch.bfloat16 or (kept > 0 if cubins else ahead > 0)
