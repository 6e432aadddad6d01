"""fused_all_reduce_layer_norm: its fast path. The rest is that of fused_all_reduce_rms_norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.all_reduce_rms_norm import host
from ..dispatch import fast_path
from ..dispatch.workspaces import ALL_REDUCE
from .all_reduce_rms_norm import named_layer_norm


def fast_all_reduce_layer_norm(
    x: Tensor, operands: Sequence[Tensor | None], eps: float, weight_offset: float, group_name: str
) -> tuple[Tensor, Tensor] | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened. Tensors may be anything.

    Args:
        operands: residual, weight and bias.
    """
    name = named_layer_norm(eps, weight_offset, *(t is not None for t in operands))
    tensors = [x, *(t for t in operands if t is not None)]
    results = fast_path.run_fast(host.LAYER_NORM, name, tensors, group_name, (ALL_REDUCE,))
    return None if results is None else (results[0], results[1])
