"""One file an op: its call, what it refuses, its fake, how it runs, its gradient. All that are imported here are ops of
``torch.ops.weft``."""
# ruff: noqa: F401

from .all_gather import ALL_GATHER, ALL_GATHER_OUT, GATHER
from .all_gather_matmul import ALL_GATHER_MATMUL
from .all_gather_scaled_matmul import ALL_GATHER_SCALED_MATMUL
from .all_reduce import ALL_REDUCE, ALL_REDUCE_IN_PLACE
from .all_reduce_rms_norm import ALL_REDUCE_LAYER_NORM, ALL_REDUCE_RMS_NORM
from .all_reduce_rms_norm_quant import ALL_REDUCE_RMS_NORM_QUANT
from .exchanges.all_to_all import ALL_TO_ALL
from .exchanges.all_to_all_matmul import ALL_TO_ALL_MATMUL
from .exchanges.matmul_all_gather import MATMUL_ALL_GATHER
from .exchanges.matmul_all_to_all import MATMUL_ALL_TO_ALL
from .experts import grouped_matmul, moe_route  # which communicate nothing
from .experts.all_gather_grouped_matmul import ALL_GATHER_GROUPED_MATMUL
from .experts.combine import MOE_COMBINE_ALL_REDUCE, MOE_COMBINE_REDUCE_SCATTER
from .experts.combine_all_reduce_rms_norm import MOE_COMBINE_ALL_REDUCE_RMS_NORM
from .experts.grouped_matmul_sums import GROUPED_MATMUL_ALL_REDUCE, GROUPED_MATMUL_REDUCE_SCATTER
from .experts.moe_combine import MOE_COMBINE
from .experts.moe_dispatch import MOE_DISPATCH, MOE_DISPATCH_AGAIN
from .matmul_all_reduce import MATMUL_ALL_REDUCE
from .matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from .op import Op
from .reduce_scatter import REDUCE_SCATTER, REDUCE_SCATTER_OUT
from .scaled_matmul_reduce_scatter import SCALED_MATMUL_REDUCE_SCATTER
from .vocabulary.linear_cross_entropy import (
    CROSS_ENTROPY_OF_SHARDED_LOGITS,
    LINEAR_CROSS_ENTROPY,
    LINEAR_LOG_PROBS,
)

OPS: tuple[Op, ...] = tuple(found for found in list(globals().values()) if isinstance(found, Op))
OP_OF = {op.name: op for op in OPS}
