"""Calls of the scaled ops as records, in the order of their schemas; and what validation finds of their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.device.gemm.scaling import BLOCK, OUT_DTYPES, ScaledProducts, ScaleKind, Scales, blocks_of
from ..dispatch.plan import aligned

# torch hands an op the dtypes of a list as the numbers by which C++ knows them.
_NUMBERED = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def dtype_of(value: Any) -> Any:
    """The dtype that an argument stands for: that of ``torch.nn.functional.scaled_mm`` where none is given."""
    if value is None:
        return torch.bfloat16
    return _NUMBERED.get(value, value) if type(value) is int else value


def output_dtype(name: str, value: Any) -> torch.dtype:
    """The same.

    Raises:
        TypeError: there are no such results.
    """
    dtype = dtype_of(value)
    if not isinstance(dtype, torch.dtype) or dtype not in OUT_DTYPES:
        shown = "a tensor" if isinstance(dtype, Tensor) else dtype
        shown = f"of type {type(dtype).__name__}" if isinstance(dtype, list | tuple | dict) else shown
        raise TypeError(f"{name}: is {shown}, must be torch.bfloat16, torch.float16 or torch.float32")
    return dtype


class AllGatherScaledMatmulCall(NamedTuple):
    A_shard: Tensor
    Bs: Sequence[Tensor]
    A_scale: Tensor
    B_scales: Sequence[Tensor]
    gather_dim: int
    group_name: str
    biases: Sequence[Tensor | None]
    result_scales: Sequence[Tensor | None]
    out_dtypes: Sequence[torch.dtype | None]
    use_fast_accum: Sequence[bool]
    return_A: bool = True
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        more = [t for t in (*self.biases, *self.result_scales) if t is not None]
        return [self.A_shard, *self.Bs, self.A_scale, *self.B_scales, *more]


class ScaledMatmulReduceScatterCall(NamedTuple):
    A: Tensor
    B: Tensor
    A_scale: Tensor
    B_scale: Tensor
    reduce_op: str
    orig_scatter_dim: int
    scatter_dim_after_maybe_reshape: int
    group_name: str
    output_shape: Sequence[int] | None
    bias: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        more = [t for t in (self.bias, self.result_scale) if t is not None]
        return [self.A, self.B, self.A_scale, self.B_scale, *more]

    @property
    def whole_shape(self) -> list[int]:
        """That of the product."""
        if self.output_shape is not None:
            return list(self.output_shape)
        return [*self.A.shape[:-1], self.B.shape[1]]

    def local_shape(self, world_size: int) -> list[int]:
        """That of the local part; ``orig_scatter_dim`` is not negative."""
        shape = self.whole_shape
        shape[self.orig_scatter_dim] = shape[self.orig_scatter_dim] // world_size
        return shape


class ScaledRows(NamedTuple):
    """How A is scaled, and which of it travels.

    Attributes:
        replicated: each rank has the scales of all ranks' rows.
    """

    kind: ScaleKind
    replicated: bool = False


def scales_of(kind: ScaleKind, a: Tensor, b: Tensor, k: int, n: int) -> Scales:
    """Scales as kernels take them: those of B are cut to K, and those of its blocks become its columns' where a row of
    A has one scale.

    Args:
        a: [M, S], or of one number.
    """
    if kind is ScaleKind.TENSOR:
        return Scales(kind, a.reshape(1, 1), b.reshape(1, 1))
    if b.numel() == 1:
        b = b.reshape(1, 1)
    elif kind is ScaleKind.ROWS and b.shape[1] != n:
        b = b[:1].repeat_interleave(BLOCK, 1)[:, :n]
    elif kind is ScaleKind.BLOCKS:
        b = b[: blocks_of(k)]
    return Scales(kind, a, b)


def scale_of_B(kind: ScaleKind, b: Tensor, k: int, n: int) -> Tensor:
    """As kernels on CUDA take it: one; [N] contiguous, from a multiple of 16 bytes on; or that of blocks as it lies."""
    scales = scales_of(kind, b.new_empty(1, 1), b, k, n)
    return aligned(scales.b.expand(1, n).contiguous()) if kind is ScaleKind.ROWS else scales.b


def why_unfused(products: ScaledProducts, what: str) -> str:
    """Why a call whose kernel is not profitable runs unfused."""
    if products.torch_has_blocks and products.kind is ScaleKind.BLOCKS:
        return f"torch's product with block-wise scales beside the collective should be faster for what is {what}"
    return f"too little is {what}"
