"""bench/run.py with wrong ops: three results are wrong on rank 1 alone, another op fails on every rank."""

from __future__ import annotations

import os
import runpy
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
import weft.fused_ops

_gather = weft.fused_ops.fused_all_gather_matmul
_norm = weft.fused_ops.fused_all_reduce_rms_norm
_reduce = weft.fused_ops.fused_matmul_all_reduce
_calls = count()


def _slightly_wrong(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    A, outs = _gather(*args, **kwargs)
    outs[0][0, 0] += 1.0
    return A, outs


def _wrong_sums(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    normed, sums = _norm(*args, **kwargs)
    sums[0, 0] += 1.0
    return normed, sums


def _wears_out(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Right when it is looked at first, and wrong when it has been timed."""
    out = _reduce(*args, **kwargs)
    if next(_calls) > 20:
        out[0, 0] += 1.0
    return out


def _fails(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("planted failure")


if os.environ["RANK"] == "1":
    weft.fused_ops.fused_all_gather_matmul = _slightly_wrong
    weft.fused_ops.fused_all_reduce_rms_norm = _wrong_sums
    weft.fused_ops.fused_matmul_all_reduce = _wears_out
weft.fused_ops.fused_matmul_reduce_scatter = _fails

RUN = Path(__file__).parents[2] / "bench" / "run.py"
sys.argv[0] = str(RUN)
runpy.run_path(str(RUN), run_name="__main__")
