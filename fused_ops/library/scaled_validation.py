"""What the scaled ops refuse, fake and real alike: what ``torch._scaled_mm`` refuses on CUDA, and scales that do not go
together. And what that of norms in fp8 refuses besides what the norm does. Nothing here looks at data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_reduce_rms_norm.quant import SCALE_OPS, default_smallest
from ...kernels.device.gemm.scaling import BLOCK, FP8, ScaleKind, blocks_of
from ...symm_mem import resolve_group
from ..ops.calls import AllReduceRmsNormQuantCall
from ..ops.scaled_calls import (
    AllGatherScaledMatmulCall,
    ScaledMatmulReduceScatterCall,
    ScaledRows,
    output_dtype,
)
from .validation import (
    dimension,
    number,
    one_of,
    reduction,
    same_device,
    type_text,
    validate_all_reduce_norm,
)

_SIZES = 16  # what torch asks K and N to be multiples of


def _fp8(name: str, x: Tensor) -> None:
    if x.dtype not in FP8:
        raise TypeError(f"{name}: is {x.dtype}, must be torch.float8_e4m3fn or torch.float8_e5m2")


def _multiple(name: str, what: str, size: int) -> None:
    if size % _SIZES:
        raise ValueError(f"{name}: {what} is {size}, must be a multiple of {_SIZES}")


def _operand(name: str, A: Tensor) -> None:
    if A.dim() < 2:
        raise ValueError(f"{name}: has {A.dim()} dimensions, must have 2 or more")
    _fp8(name, A)
    _multiple(name, "its last size, K,", A.shape[-1])


def _matrix(name: str, B: Tensor, k: int, A: Tensor, A_name: str) -> None:
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
    same_device(name, B, A, A_name)


def _scale(name: str, scale: Tensor, A: Tensor, A_name: str) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: is {scale.dtype}, must be torch.float32")
    same_device(name, scale, A, A_name)


def scaled_rows(
    name: str, scale: Tensor, lead: Sequence[int], k: int, whole: Sequence[int] = ()
) -> ScaledRows:
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
    raise ValueError(f"{name}: has shape {shape}, must have one element, or {', or '.join(kinds)}")


def _scale_of_B(name: str, scale: Tensor, rows: ScaledRows, A_scale: Tensor, B: Tensor) -> None:
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


def _added(name: str, bias: Tensor | None, n: int, out_dtype: torch.dtype, A: Tensor) -> None:
    if bias is None:
        return
    if out_dtype == torch.float32:
        raise ValueError(f"{name}: is given, must be None where the result is torch.float32")
    if tuple(bias.shape) != (n,):
        raise ValueError(f"{name}: has shape {tuple(bias.shape)}, must have {(n,)}, one for each column")
    if bias.dtype != out_dtype:
        raise TypeError(f"{name}: is {bias.dtype}, must be {out_dtype} like the result")
    same_device(name, bias, A, "A")


def _result_scale(name: str, scale: Tensor | None, A: Tensor) -> None:
    if scale is None:
        return
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(
            f"{name}: is {scale.dtype} of shape {tuple(scale.shape)}, must be torch.float32 of one element"
        )
    same_device(name, scale, A, "A")


def validate_all_gather_scaled_matmul(
    call: AllGatherScaledMatmulCall,
) -> tuple[AllGatherScaledMatmulCall, ScaledRows, ProcessGroup]:
    """The call with a dimension that is not negative and the dtypes of its results; how A is scaled; the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, A = resolve_group(call.group_name), call.A_shard
    _operand("A_shard", A)
    dimension("gather_dim", call.gather_dim, "A_shard", A.dim())
    dim, (*lead, k) = call.gather_dim % A.dim(), A.shape
    if not call.Bs:
        raise ValueError("Bs: is empty, must hold at least one matrix")
    for name in ("B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum"):
        if len(given := getattr(call, name)) != len(call.Bs):
            raise ValueError(f"{name}: has {len(given)} elements, must have {len(call.Bs)}, as many as Bs")
    last = dim == A.dim() - 1
    for i, B in enumerate(call.Bs):
        _matrix(f"Bs[{i}]", B, k * group.size() if last else k, A, "A_shard")
    _scale("A_scale", call.A_scale, A, "A_shard")
    whole = [size * group.size() if i == dim else size for i, size in enumerate(lead)]
    rows = scaled_rows("A_scale", call.A_scale, lead, k, whole)
    if last and rows.kind is ScaleKind.BLOCKS and k % BLOCK:
        raise ValueError(
            f"gather_dim: is the last dimension, of {k}, which must be a multiple of {BLOCK} for block-wise scales"
        )
    out_dtypes = [output_dtype(f"out_dtypes[{i}]", value) for i, value in enumerate(call.out_dtypes)]
    for i, (B, scale) in enumerate(zip(call.Bs, call.B_scales, strict=True)):
        _scale(f"B_scales[{i}]", scale, A, "A_shard")
        _scale_of_B(f"B_scales[{i}]", scale, rows, call.A_scale, B)
        _added(f"biases[{i}]", call.biases[i], B.shape[1], out_dtypes[i], A)
        _result_scale(f"result_scales[{i}]", call.result_scales[i], A)
    return call._replace(gather_dim=dim, out_dtypes=out_dtypes), rows, group


def validate_scaled_matmul_reduce_scatter(
    call: ScaledMatmulReduceScatterCall,
) -> tuple[ScaledMatmulReduceScatterCall, ScaledRows, ProcessGroup]:
    """The call with a dimension that is not negative, the shape of the product and the dtype of the result; how A is
    scaled; the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, A, B = resolve_group(call.group_name), call.A, call.B
    _operand("A", A)
    *lead, k = A.shape
    _matrix("B", B, k, A, "A")
    _scale("A_scale", call.A_scale, A, "A")
    rows = scaled_rows("A_scale", call.A_scale, lead, k)
    _scale("B_scale", call.B_scale, A, "A")
    _scale_of_B("B_scale", call.B_scale, rows, call.A_scale, B)
    reduction(call.reduce_op)
    shape = call.whole_shape
    if shape[-1:] != [B.shape[1]] or prod(shape[:-1]) != prod(lead):
        raise ValueError(
            f"output_shape: is {shape}, must be of {prod(lead)} rows, as A has, and {B.shape[1]} columns, as B has"
        )
    dimension("orig_scatter_dim", call.orig_scatter_dim, "product", len(shape))
    dimension("scatter_dim_after_maybe_reshape", call.scatter_dim_after_maybe_reshape, "A", A.dim())
    dim = call.orig_scatter_dim % len(shape)
    if shape[dim] % group.size():
        raise ValueError(
            f"orig_scatter_dim: A @ B has size {shape[dim]} there, must be a multiple of {group.size()} ranks"
        )
    out_dtype = output_dtype("out_dtype", call.out_dtype)
    _added("bias", call.bias, B.shape[1], out_dtype, A)
    _result_scale("result_scale", call.result_scale, A)
    call = call._replace(orig_scatter_dim=dim, output_shape=shape, out_dtype=out_dtype)
    return call, rows, group


def quantisation(out_dtype: Any, scale_op: Any, smallest: Any) -> None:
    """What would not reach the op's own checks."""
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(
            f"out_dtype: is {type_text(out_dtype)}, must be torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if not isinstance(scale_op, str):
        raise TypeError(f"scale_op: is {type_text(scale_op)}, must be {one_of(SCALE_OPS)}")
    if smallest is not None:
        number("smallest", smallest)


def validate_all_reduce_rms_norm_quant(
    call: AllReduceRmsNormQuantCall,
) -> tuple[AllReduceRmsNormQuantCall, ProcessGroup]:
    """The call with a dtype, and without a scale also with what bounds the rows' scales; and the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, x, dtype, scale = validate_all_reduce_norm(call.norm), call.x, call.out_dtype, call.scale
    dtype = torch.float8_e4m3fn if dtype is None else dtype
    if dtype not in FP8:
        raise TypeError(f"out_dtype: is {dtype}, must be torch.float8_e4m3fn or torch.float8_e5m2")
    if call.scale_op not in SCALE_OPS:
        raise ValueError(f"scale_op: is {call.scale_op!r}, must be {one_of(SCALE_OPS)}")
    if scale is not None:
        _scale("scale", scale, x, "x")
        if scale.numel() != 1:
            raise ValueError(f"scale: has shape {tuple(scale.shape)}, must have one element")
        if call.smallest is not None:
            raise ValueError(f"smallest: is {call.smallest!r}, must be None where a scale is given")
        return call._replace(out_dtype=dtype), group
    if x.shape[-1] == 0:
        raise ValueError("x: has rows of no element, must have some where no scale is given")
    smallest = default_smallest(call.scale_op, dtype) if call.smallest is None else call.smallest
    if not 0 <= smallest <= torch.finfo(torch.float32).max:
        raise ValueError(f"smallest: is {smallest!r}, must be 0 or more, and finite in float32")
    return call._replace(out_dtype=dtype, smallest=float(smallest)), group
