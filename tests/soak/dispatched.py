"""A rank's tokens that go to experts of all ranks, and come back weighted: the soak's calls of moe_dispatch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from weft.fused_ops import moe_combine, moe_dispatch


def _chosen(a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Of two experts a rank, each once in a token, some of none; and the choices' weights."""
    experts, tokens = 2 * a.shape[0], torch.arange(a.shape[1], device=a.device) + rank
    first = tokens * 5 % (experts + 1)
    ids = torch.stack([first, (first + 1 + tokens % experts) % (experts + 1)], 1)
    return ids, torch.arange(1.0, 3.0, device=a.device).expand(len(tokens), 2)


def run_dispatched(a: Tensor, rank: int, group: dist.ProcessGroup, align: int) -> list[Tensor]:
    ids, weights = _chosen(a, rank)
    rows, _, handle = moe_dispatch(a[rank], ids, 2 * a.shape[0], group, align=align)
    return [moe_combine(rows, handle, weights, group)]


def expected_dispatched(a: Tensor, rank: int) -> list[Tensor]:
    ids, weights = _chosen(a, rank)
    return [(a[rank] * (weights * (ids < 2 * a.shape[0])).sum(1, keepdim=True)).to(a.dtype)]
