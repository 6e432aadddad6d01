"""Fused tensor-parallel ops: as functions, in ``torch.ops.weft``, and found in compiled graphs by a pass."""

from .functional import fused_all_gather_matmul, fused_matmul_reduce_scatter, one_shot_all_reduce
from .plan import Plan, last_plan

__all__ = [
    "Plan",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "last_plan",
    "one_shot_all_reduce",
]
