"""Fused tensor-parallel ops: as functions, in ``torch.ops.weft``, and found in compiled graphs by a pass."""

from .collectives import one_shot_all_gather, one_shot_reduce_scatter
from .dispatch.plan import Plan, last_plan
from .functional import (
    fused_all_gather_matmul,
    fused_all_reduce_rms_norm,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    one_shot_all_reduce,
    one_shot_all_reduce_,
)
from .layers.checkpoint import local_state_dict, sharded_state_dict
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .library import flops as flops  # torch's counter knows them
from .library import registration as registration  # torch.ops.weft is implemented
from .passes import FusionError, FusionPass, Report

__all__ = [
    "ColumnParallelLinear",
    "FusionError",
    "FusionPass",
    "Plan",
    "Report",
    "RowParallelLinear",
    "fused_all_gather_matmul",
    "fused_all_reduce_rms_norm",
    "fused_matmul_all_reduce",
    "fused_matmul_reduce_scatter",
    "last_plan",
    "local_state_dict",
    "one_shot_all_gather",
    "one_shot_all_reduce",
    "one_shot_all_reduce_",
    "one_shot_reduce_scatter",
    "sharded_state_dict",
]
