"""What the scaled ops have in common: how operands are scaled, and what ``torch._scaled_mm`` refuses on CUDA. Nothing
here looks at data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.device.gemm.scaling import (
    BLOCK,
    FP8,
    OUT_DTYPES,
    ScaledProducts,
    ScaleKind,
    Scales,
    blocks_of,
    exact_product,
)
from . import validation
from .dispatch.staging import aligned

_SIZES = 16  # what torch asks K and N to be multiples of
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
        return f"torch's product with block-wise scales next to the collective should be faster for what is {what}"
    return f"too little is {what}"


def _fp8(name: str, x: Tensor) -> None:
    if x.dtype not in FP8:
        raise TypeError(f"{name}: is {x.dtype}, must be torch.float8_e4m3fn or torch.float8_e5m2")


def _multiple(name: str, what: str, size: int) -> None:
    if size % _SIZES:
        raise ValueError(f"{name}: {what} is {size}, must be a multiple of {_SIZES}")


def validate_operand(name: str, A: Tensor) -> None:
    validation.dimensions(name, A, 2, or_more=True)
    _fp8(name, A)
    _multiple(name, "its last size, K,", A.shape[-1])


def validate_scaled_matrix(name: str, B: Tensor, k: int, A: Tensor, A_name: str) -> None:
    if B.dim() != 2:
        raise ValueError(f"{name}: has {B.dim()} dimensions, must be a matrix [K, N]")
    _fp8(name, B)
    if A.dtype == B.dtype == torch.float8_e5m2:
        raise TypeError(f"{name}: is {B.dtype} like {A_name}, must be torch.float8_e4m3fn: one of both must")
    if B.shape[0] != k:
        raise ValueError(f"{name}: has {B.shape[0]} rows, must have {k}, as many as {A_name} has columns")
    _multiple(name, "its number of columns, N,", B.shape[1])
    if B.stride(0) != 1 or (B.shape[1] > 1 and B.stride(1) < k):
        raise ValueError(
            f"{name}: has strides {tuple(B.stride())}, must be column-major: the .t() of a matrix [N, K] whose rows "
            "are contiguous"
        )
    validation.same_device(name, B, A, A_name)


def validate_scale(name: str, scale: Tensor, A: Tensor, A_name: str) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: is {scale.dtype}, must be torch.float32")
    validation.same_device(name, scale, A, A_name)


def scaled_rows(scale: Tensor, lead: Sequence[int], k: int, whole: Sequence[int] = ()) -> ScaledRows:
    """How A is scaled.

    Args:
        lead: the sizes of A, or of its shard, but for the last one, which is ``k``.
        whole: those of the gathered A.
    """
    shape, lead, blocks = tuple(scale.shape), tuple(lead), blocks_of(k)
    # As torch has it: where a shard has one row, a scale of its shape is that row's.
    if shape == (*lead, 1):
        return ScaledRows(ScaleKind.ROWS)
    if scale.numel() == 1:
        return ScaledRows(ScaleKind.TENSOR)
    if blocks > 1 and shape == (*lead, blocks):
        return ScaledRows(ScaleKind.BLOCKS)
    if whole and shape == (*whole, 1):
        return ScaledRows(ScaleKind.ROWS, replicated=True)
    kinds = [f"{(*lead, 1)} with a scale for each row", f"{(*lead, blocks)} with one for each {BLOCK} of K"]
    if whole:
        kinds.append(f"{(*whole, 1)} with those of all ranks' rows")
    raise ValueError(f"A_scale: has shape {shape}, must have one element, or {', or '.join(kinds)}")


def validate_scale_of_B(name: str, scale: Tensor, rows: ScaledRows, A_scale: Tensor, B: Tensor) -> None:
    (k, n), shape = B.shape, tuple(scale.shape)
    blocks = blocks_of(k), blocks_of(n)
    padded = -(-blocks[0] // 4) * 4  # as torch's kernels want them
    of_blocks = shape in (blocks, (padded, blocks[1]))
    if rows.kind is ScaleKind.TENSOR:
        fits, must = scale.numel() == 1, "one element"
    elif rows.kind is ScaleKind.BLOCKS:
        fits, must = of_blocks, f"{blocks}, one for each {BLOCK} x {BLOCK}"
    else:
        alone = scale.numel() == 1 and A_scale.numel() == 1
        fits, must = (
            shape == (1, n) or alone or (blocks[0] == 1 and of_blocks),
            f"{(1, n)}, one for each column",
        )
    if not fits:
        raise ValueError(
            f"{name}: has shape {shape}, must have {must}, as A_scale, {tuple(A_scale.shape)}, is {rows.kind.value}"
        )


def validate_bias(name: str, bias: Tensor | None, n: int, out_dtype: torch.dtype, A: Tensor) -> None:
    if bias is None:
        return
    if out_dtype == torch.float32:
        raise ValueError(f"{name}: is given, must be None where the result is torch.float32")
    validation.must_have_shape(name, bias, (n,), ", one for each column")
    if bias.dtype != out_dtype:
        raise TypeError(f"{name}: is {bias.dtype}, must be {out_dtype} like the result")
    validation.same_device(name, bias, A, "A")


def validate_result_scale(name: str, scale: Tensor | None, A: Tensor) -> None:
    if scale is None:
        return
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(
            f"{name}: is {scale.dtype} of shape {tuple(scale.shape)}, must be torch.float32 of one element"
        )
    validation.same_device(name, scale, A, "A")


#: Why the products have no gradient.
NO_GRADIENT = (
    ": products of given fp8 numbers have none; detach it, or call float8_all_gather_matmul or "
    "float8_matmul_reduce_scatter, which cast to fp8 themselves"
)


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


class ScaledGather:
    """A call with its shard as rows.

    Attributes:
        front: the shard with the gathered dimension in front, unless it is the last.
        a: its rows, [m, K].
        sent: their scales [m, S], if each rank has those of its own rows.
        last: whether shards lie side by side along K.
    """

    def __init__(self, call: AllGatherScaledMatmulCall, rows: ScaledRows, size: int) -> None:
        dim, self.call, self.rows, self.size = call.gather_dim, call, rows, size
        self.last = dim == call.A_shard.dim() - 1

        def flat(x: Tensor) -> Tensor:
            return (x if self.last else x.movedim(dim, 0)).flatten(0, -2)

        self.front = call.A_shard if self.last else call.A_shard.movedim(dim, 0)
        self.a = flat(call.A_shard)
        travels = rows.kind is not ScaleKind.TENSOR and not rows.replicated
        self.sent = flat(call.A_scale) if travels else None
        self.given = call.A_scale.reshape(1, 1) if rows.kind is ScaleKind.TENSOR else flat(call.A_scale)
        (self.m, self.k) = self.a.shape

    def scales_of_ranks(self, arrived: Tensor | None) -> Sequence[Tensor]:
        """Those of each rank's rows, given those that have arrived with them [W, m, S], if any did."""
        if arrived is not None:
            return arrived.unbind()
        return [self.given] * self.size if self.rows.kind is ScaleKind.TENSOR else self.given.split(self.m)

    def part_of_B(self, i: int, src: int) -> tuple[Tensor, Tensor]:
        """Of B number i, and of its scales, the rows that a rank's shard is multiplied with."""
        B, scale, k = self.call.Bs[i], self.call.B_scales[i], self.k
        if not self.last:
            return B, scale
        if self.rows.kind is ScaleKind.BLOCKS:
            scale = scale[src * blocks_of(k) :][: blocks_of(k)]
        return B[src * k : (src + 1) * k], scale

    def exact(self, i: int, src: int, a: Tensor, a_scale: Tensor) -> Tensor:
        """In float32, the product of some rows of a rank with B number i."""
        b, b_scale = self.part_of_B(i, src)
        return exact_product(a, b, scales_of(self.rows.kind, a_scale, b_scale, self.k, b.shape[1]))

    def finished(self, i: int, product: Tensor) -> Tensor:
        """The same with its bias, in the dtype of the result."""
        bias = self.call.biases[i]
        return (product if bias is None else product + bias).to(self.call.out_dtypes[i])

    def shaped(self, flat: Tensor) -> Tensor:
        """Rows of all ranks as the op returns them."""
        dim, front = self.call.gather_dim, self.front
        if self.last:
            return flat.reshape(-1).view(*front.shape[:-1], flat.shape[-1])
        return flat.view(self.size * front.shape[0], *front.shape[1:-1], flat.shape[-1]).movedim(0, dim)

    def shaped_A(self, gathered: Tensor) -> Tensor:
        """The gathered A of shards [W, m, K]."""
        if not self.last:
            return self.shaped(gathered.flatten(0, 1))
        # By way of one dimension: where K is 1, a view with other strides would do.
        return self.shaped(gathered.movedim(0, 1).reshape(-1).view(self.m, self.size * self.k))
