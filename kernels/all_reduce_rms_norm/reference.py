"""The sum with the residual and its norm, in plain torch, behind an all-reduce. With float64 inputs the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormKind(NamedTuple):
    """What is computed: by which numbers, of which sum, and from what.

    ``round_sum``: the norm is that of the rounded sum, else of the sum in float32. ``residual``: there is one.
    ``wide_weight``: the weight is float32 beside 16 bits.
    """

    eps: float
    weight_offset: float = 0.0
    round_sum: bool = True
    residual: bool = True
    wide_weight: bool = False


def rms_norm(
    sums: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """``sums / sqrt(mean(sums ** 2) + eps) * (weight + weight_offset)`` of each row, in float32 or wider."""
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    factor = weight if weight_offset == 0 else weight.to(wide.dtype) + weight_offset
    return (wide * scale * factor).to(sums.dtype)


def add_residual_and_norm(
    total: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, kind: NormKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, sums), of the dtype of ``total``, which is what all ranks' x add up to."""
    sums = total if residual is None else total + residual
    if residual is None or kind.round_sum:
        return rms_norm(sums, weight, kind.eps, kind.weight_offset), sums
    wide = total.to(torch.promote_types(total.dtype, torch.float32)) + residual
    return rms_norm(wide, weight, kind.eps, kind.weight_offset).to(total.dtype), sums
