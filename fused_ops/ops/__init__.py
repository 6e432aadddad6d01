"""One file an op: its call, what it refuses, its fake, how it runs, its gradient."""

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
from .experts import grouped_matmul as grouped_matmul  # torch.ops.weft has it
from .experts import moe_route as moe_route  # likewise
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

OPS: tuple[Op, ...] = (
    ALL_GATHER_MATMUL,
    ALL_GATHER_GROUPED_MATMUL,
    MATMUL_REDUCE_SCATTER,
    ALL_GATHER_SCALED_MATMUL,
    SCALED_MATMUL_REDUCE_SCATTER,
    ALL_REDUCE,
    ALL_REDUCE_IN_PLACE,
    ALL_GATHER,
    ALL_GATHER_OUT,
    GATHER,
    REDUCE_SCATTER,
    REDUCE_SCATTER_OUT,
    ALL_TO_ALL,
    ALL_TO_ALL_MATMUL,
    MATMUL_ALL_TO_ALL,
    MATMUL_ALL_GATHER,
    ALL_REDUCE_RMS_NORM,
    ALL_REDUCE_RMS_NORM_QUANT,
    ALL_REDUCE_LAYER_NORM,
    MATMUL_ALL_REDUCE,
    MOE_COMBINE_ALL_REDUCE,
    MOE_COMBINE_ALL_REDUCE_RMS_NORM,
    MOE_COMBINE_REDUCE_SCATTER,
    MOE_DISPATCH,
    MOE_DISPATCH_AGAIN,
    MOE_COMBINE,
    GROUPED_MATMUL_ALL_REDUCE,
    GROUPED_MATMUL_REDUCE_SCATTER,
    LINEAR_CROSS_ENTROPY,
    LINEAR_LOG_PROBS,
    CROSS_ENTROPY_OF_SHARDED_LOGITS,
)
OP_OF = {op.name: op for op in OPS}
