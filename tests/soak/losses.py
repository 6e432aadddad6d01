"""Losses of columns that the ranks share, for the soak: of all ranks' x [W, M, K], the same, and weights [W, N, K].

No exact numbers: what is expected is computed by the same kernels of all ranks' operands, so that what travels is left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft.fused_ops import cross_entropy_of_sharded_logits, fused_linear_cross_entropy
from weft.fused_ops.ops.vocabulary import chunks
from weft.kernels.linear_cross_entropy.reference import Columns, Loss, Scores

IGNORED = -1


def _targets(x: Tensor, weights: Tensor) -> Tensor:
    """Of all ranks' columns; some are ignored."""
    return torch.arange(x.shape[1], device=x.device) * 5 % (weights.shape[:2].numel() + 1) + IGNORED


def run_loss(
    op: str, x: Tensor, weights: Tensor, at: tuple[int, bool], group: dist.ProcessGroup
) -> list[Tensor]:
    """
    Args:
        at: the rank, and whether it says which columns it has.
    """
    rank, says = at
    how: dict[str, Any] = {"ignore_index": IGNORED, "vocab_start": rank * weights.shape[1] if says else None}
    targets, mine = _targets(x, weights), weights[rank]
    if op == "cross_entropy":
        return [cross_entropy_of_sharded_logits(x[rank] @ mine.t(), targets, group, reduction="none", **how)]
    return [fused_linear_cross_entropy(x[rank], mine, targets, group, reduction="sum", **how)]


def expected_loss(op: str, x: Tensor, weights: Tensor) -> list[Tensor]:
    targets, statistics = _targets(x, weights), []
    for rank, (rows, weight) in enumerate(zip(x, weights, strict=True)):
        start = torch.full((1,), rank * len(weight), device=x.device)
        columns = Columns(targets, start, Scores(None, 1.0), "")
        statistics.append(chunks.statistics([rows @ weight.t()], columns))
    losses, _ = chunks.row_losses(torch.stack(statistics), targets, Loss(IGNORED, 0.0, 0.0), None)
    return [losses if op == "cross_entropy" else losses.sum()]
