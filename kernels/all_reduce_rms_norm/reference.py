"""The norm, in plain torch; the sum in front of it is the all-reduce's. With float64 inputs the reference."""

from __future__ import annotations

import torch


def rms_norm(sums: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``sums / sqrt(mean(sums ** 2) + eps) * weight`` over the last dimension, in float32 or wider."""
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(sums.dtype)
