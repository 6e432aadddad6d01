"""Weights of which each rank has a shard, gathered inside of the graph."""

from __future__ import annotations

from typing import Any

import torch
from spelled import ag, rs
from torch import Tensor


class GatheredShard(torch.autograd.Function):
    """A weight that is gathered for its use, and whose gradient is scattered: FSDP inside of the graph."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype) -> Tensor:
        return ag(shard.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return rs(grad, "avg").float(), None


def model(x: Tensor, shards: list[Tensor]) -> Tensor:
    for shard in shards:
        w = GatheredShard.apply(shard, torch.bfloat16)
        x = torch.nn.functional.silu(x.to(torch.bfloat16) @ w) @ w.t()
    return x.float()
