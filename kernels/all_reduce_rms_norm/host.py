"""CPU ranks: the names of the ops; the sum is that of ``one_shot_all_reduce``, which each rank norms."""

from __future__ import annotations

from .reference import NormKind

OP = "fused_all_reduce_rms_norm"
LAYER_NORM = "fused_all_reduce_layer_norm"
COMBINE = "fused_moe_combine_all_reduce_rms_norm"
QUANT = "fused_all_reduce_rms_norm_quant"


def op_of(kind: NormKind) -> str:
    """The public op that computes it."""
    if kind.quant is not None:
        return QUANT
    if kind.combine is not None:
        return COMBINE
    return LAYER_NORM if kind.subtract_mean else OP
