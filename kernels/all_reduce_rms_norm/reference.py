"""What the op computes, in plain torch: the unfused path, and with float64 inputs the reference."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def rms_norm(sums: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``sums / sqrt(mean(sums ** 2) + eps) * weight`` over the last dimension, in float32 or wider."""
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(sums.dtype)


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, sums), both contiguous."""
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel():
        dist.all_reduce(total, group=group)
    sums = (total + residual).contiguous()
    return rms_norm(sums, weight, eps), sums
