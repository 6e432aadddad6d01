"""Which last dimensions the kernels around a matmul gather and scatter: asked by an op's call and its plan, and by the
graph pass, which has no tensors yet."""

from __future__ import annotations

import torch

from . import gemm
from .one_shot import MOST_BYTES
from .scaling import BLOCK, ScaledProducts, ScaleKind

WHY_NO_GEMM = "the kernels for such a product need wgmma or tcgen05, of Hopper GPUs and B200"
WHY_NO_FLOAT32 = (
    f"at most {MOST_BYTES >> 20} MiB of a float32 product are scattered, along its outermost dimension"
)


def why_last_dim_not_gathered(dtype: torch.dtype, scaled: ScaledProducts | None) -> str | None:
    """Why no kernel gathers the last dimension of such operands, along which products are summed.

    Args:
        scaled: how fp8 operands are scaled.
    """
    if scaled is None:
        return None if dtype in gemm.DTYPES else f"the kernels do not gather the last dimension of {dtype}"
    if scaled.kind is ScaleKind.TENSOR:
        return None
    return f"the kernels do not gather the last dimension with {scaled.kind.value} scales"


def why_last_dim_not_scattered(dtype: torch.dtype, scaled: ScaledProducts | None, n: int) -> str | None:
    """Why no kernel scatters the last dimension of products of such operands.

    Args:
        scaled: how fp8 operands are scaled.
        n: columns of a rank's part.
    """
    if scaled is None:
        return None if dtype in gemm.DTYPES else f"the kernels do not scatter the last dimension of {dtype}"
    if scaled.kind is ScaleKind.BLOCKS and n % BLOCK:
        return f"the last dimension is scattered, of which a rank has no whole blocks of {BLOCK}"
    return None
