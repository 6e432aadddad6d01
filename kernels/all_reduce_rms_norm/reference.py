"""The sum with the residual and its norm, in plain torch, after an all-reduce. With float64 inputs the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.collective.combine import CombineShape
from . import COMBINE, LAYER_NORM, OP, QUANT
from .quant import QuantKind


class NormKind(NamedTuple):
    """What is computed: by which numbers, of which sum, and from what.

    ``round_sum``: the norm is that of the rounded sum, else of the sum in float32. ``residual``: there is one.
    ``wide_weight``: weight and bias are float32 where x has 16 bits. ``subtract_mean``: it is a LayerNorm, which may go
    without a ``weight`` and have a ``bias``. ``quant``: what becomes of the normed rows, of an RMSNorm. ``combine``: of
    which parts x is put together.
    """

    eps: float
    weight_offset: float = 0.0
    round_sum: bool = True
    residual: bool = True
    wide_weight: bool = False
    subtract_mean: bool = False
    weight: bool = True
    bias: bool = False
    quant: QuantKind | None = None
    combine: CombineShape | None = None

    @property
    def op(self) -> str:
        """The public op that computes it."""
        if self.quant is not None:
            return QUANT
        if self.combine is not None:
            return COMBINE
        return LAYER_NORM if self.subtract_mean else OP


def rms_norm(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
    *,
    subtract_mean: bool = False,
) -> torch.Tensor:
    """``sums / sqrt(mean(sums ** 2) + eps) * (weight + weight_offset) + bias`` of each row, in float32 or wider; with
    ``subtract_mean`` of rows less their mean: a LayerNorm."""
    # Not torch's norms, which take no weight of 16 bits with sums in float32.
    wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
    if subtract_mean:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        normed = normed * (weight if weight_offset == 0 else weight.to(wide.dtype) + weight_offset)
    return (normed if bias is None else normed + bias).to(sums.dtype)


class Affine(NamedTuple):
    """What a normed row is multiplied by and what is added to it, where there is something."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None


def add_residual_and_norm(
    total: torch.Tensor, residual: torch.Tensor | None, affine: Affine, kind: NormKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, sums), of the dtype of ``total``, which is what all ranks' x add up to."""
    sums = total if residual is None else total + residual
    of = sums
    if residual is not None and not kind.round_sum:
        of = total.to(torch.promote_types(total.dtype, torch.float32)) + residual
    weight, bias = affine
    normed = rms_norm(of, weight, kind.eps, kind.weight_offset, bias, subtract_mean=kind.subtract_mean)
    return normed.to(total.dtype), sums
