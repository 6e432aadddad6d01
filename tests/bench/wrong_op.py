"""A pytest plugin (``-p wrong_op``): one op's result is wrong on rank 1 alone, another op fails on every rank."""

from __future__ import annotations

import os
from typing import Any

import torch
import weft.fused_ops

_right = weft.fused_ops.fused_all_gather_matmul


def _slightly_wrong(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    A, outs = _right(*args, **kwargs)
    outs[0][0, 0] += 1.0
    return A, outs


def _fails(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("planted failure")


if os.environ["RANK"] == "1":
    weft.fused_ops.fused_all_gather_matmul = _slightly_wrong
weft.fused_ops.fused_matmul_reduce_scatter = _fails
