"""Which last dimensions the kernels around a matmul gather and scatter: asked by an op's call and its plan, and by the
graph pass, which has no tensors yet."""

from __future__ import annotations

from .scaling import BLOCK, ScaledProducts, ScaleKind

WHY_NO_GEMM = "the kernels for such a product need wgmma or tcgen05, of Hopper GPUs and B200"


def why_last_dim_not_gathered(scaled: ScaledProducts | None) -> str | None:
    """Why no kernel gathers the last dimension of such operands, along which products are summed.

    Args:
        scaled: how fp8 operands are scaled.
    """
    if scaled is None or scaled.kind is ScaleKind.TENSOR:
        return None
    return f"the kernels do not gather the last dimension with {scaled.kind.value} scales"


def why_last_dim_not_scattered(scaled: ScaledProducts | None, n: int) -> str | None:
    """Why no kernel scatters the last dimension of products of such operands.

    Args:
        scaled: how fp8 operands are scaled.
        n: columns of a rank's part.
    """
    if scaled is not None and scaled.kind is ScaleKind.BLOCKS and n % BLOCK:
        return f"the last dimension is scattered, of which a rank has no whole blocks of {BLOCK}"
    return None
