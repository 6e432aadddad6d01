"""fused_scaled_matmul_reduce_scatter: from the op's tensors to the parts that travel, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.gemm.scaling import (
    ScaledProducts,
    ScaleKind,
    as_pairs,
    exact_product,
    has_block_product,
    torch_product,
)
from ...kernels.device.gemm.supported import why_last_dim_not_scattered
from ...kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import scaled_calls, validation
from ..dispatch.choice import Choice, Known, choose_kernel, host_or, launch_kernel, unfused
from ..dispatch.plan import num_sms, preferred_kernel
from ..dispatch.staging import Staging, aligned
from ..scaled_calls import NO_GRADIENT, ScaledRows
from .matmul_reduce_scatter import matmul_flops
from .op import Op
from .reduce_scatter import ReduceScatterCall, run_reduce_scatter

OP = "fused_scaled_matmul_reduce_scatter"


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


def _validate(
    call: ScaledMatmulReduceScatterCall,
) -> tuple[ScaledMatmulReduceScatterCall, ScaledRows, ProcessGroup]:
    """The call with a dimension that is not negative, the shape of the product and the dtype of the result; how A is
    scaled; the group."""
    group, A, B = resolve_group(call.group_name), call.A, call.B
    scaled_calls.validate_operand("A", A)
    *lead, k = A.shape
    scaled_calls.validate_scaled_matrix("B", B, k, A, "A")
    scaled_calls.validate_scale("A_scale", call.A_scale, A, "A")
    rows = scaled_calls.scaled_rows(call.A_scale, lead, k)
    scaled_calls.validate_scale("B_scale", call.B_scale, A, "A")
    scaled_calls.validate_scale_of_B("B_scale", call.B_scale, rows, call.A_scale, B)
    validation.reduction(call.reduce_op)
    shape = call.whole_shape
    if shape[-1:] != [B.shape[1]] or prod(shape[:-1]) != prod(lead):
        raise ValueError(
            f"output_shape: is {shape}, must be of {prod(lead)} rows, as A has, and {B.shape[1]} columns, as B has"
        )
    validation.dimension("orig_scatter_dim", call.orig_scatter_dim, "product", len(shape))
    validation.dimension(
        "scatter_dim_after_maybe_reshape", call.scatter_dim_after_maybe_reshape, "A", A.dim()
    )
    dim = call.orig_scatter_dim % len(shape)
    if shape[dim] % group.size():
        # weft's function gives no shape, torch's does.
        named = "scatter_dim" if call.output_shape is None else "orig_scatter_dim"
        raise ValueError(
            f"{named}: A @ B has size {shape[dim]} there, must be a multiple of {group.size()} ranks"
        )
    out_dtype = scaled_calls.output_dtype("out_dtype", call.out_dtype)
    scaled_calls.validate_bias("bias", call.bias, B.shape[1], out_dtype, A)
    scaled_calls.validate_result_scale("result_scale", call.result_scale, A)
    call = call._replace(orig_scatter_dim=dim, output_shape=shape, out_dtype=out_dtype)
    return call, rows, group


def _known_by(call: ScaledMatmulReduceScatterCall) -> Known:
    sizes, dtype = call.output_shape, scaled_calls.dtype_of(call.out_dtype)
    if call.result_scale is not None or type(dtype) is not torch.dtype:
        return None
    if sizes is not None:
        if any(type(size) is not int for size in sizes):
            return None
        sizes = tuple(sizes)
    dims = call.orig_scatter_dim, call.scatter_dim_after_maybe_reshape
    how = call.reduce_op, *dims, dtype, call.use_fast_accum, sizes, call.bias is not None
    given = call.A, call.B, call.A_scale, call.B_scale
    return how, given if call.bias is None else (*given, call.bias)


def _run(
    choice: Choice, where: Heap, call: ScaledMatmulReduceScatterCall, rows: ScaledRows, group: ProcessGroup
) -> Tensor:
    """As the op; call and rows are what validation returns."""
    if choice.algorithm not in ("host", "unfused"):
        return _on_cuda(choice, where, call, rows)
    (k, n), out_dtype, exact = call.B.shape, call.out_dtype, choice.algorithm == "host"
    assert out_dtype is not None
    if exact:
        choice.begin_on(where, OP)
    a_scale = call.A_scale if rows.kind is ScaleKind.TENSOR else call.A_scale.flatten(0, -2)
    scales = scaled_calls.scales_of(rows.kind, a_scale, call.B_scale, k, n)
    operands = call.A.flatten(0, -2), call.B, scales
    if exact:
        product = exact_product(*operands)
        product = product if call.bias is None else product.add_(call.bias)
    else:
        product = torch_product(*operands, call.bias, out_dtype, fast=call.use_fast_accum)
    whole = product.view(call.whole_shape)
    scatter = ReduceScatterCall(whole, call.reduce_op, call.orig_scatter_dim, call.group_name)
    return run_reduce_scatter(choice, where, scatter, group, op=OP).to(out_dtype)


def _choose_on_cuda(call: ScaledMatmulReduceScatterCall, rows: ScaledRows, group: ProcessGroup) -> Choice:
    from ...kernels.matmul_reduce_scatter import on_cuda

    size, dim, (*lead, n), out_dtype = group.size(), call.orig_scatter_dim, call.whole_shape, call.out_dtype
    assert out_dtype is not None
    split_n, types = dim == len(lead), (call.A.dtype, call.B.dtype)
    products = ScaledProducts(
        types=types,
        kind=rows.kind,
        out_dtype=out_dtype,
        promote=rows.kind is ScaleKind.BLOCKS or not call.use_fast_accum,
        torch_has_blocks=has_block_product(prod(lead), types, call.A.device),
    )
    if split_n and (reason := why_last_dim_not_scattered(products, n // size)) is not None:
        return unfused(reason)
    before = prod(lead[:dim])
    parts = (1, 1, prod(lead)) if split_n else (before, size, prod(lead) // (before * size))
    staging = Staging()
    a = staging.take("A", as_pairs(call.A, products.pairs), lambda x: x.view(*parts, x.shape[-1]))
    b = staging.take("B", as_pairs(call.B.t(), products.pairs)).t()
    epilogue = Epilogue(out_dtype, call.reduce_op == "avg")
    used = ScatterKernelCall(
        *(a, b, num_sms(b.device), epilogue), split_n=split_n, preferred=preferred_kernel(), scaled=products
    )
    too_little = scaled_calls.why_unfused(products, "multiplied and scattered")
    return choose_kernel(on_cuda.SCATTER_STEPS, used, staging, group, too_little)


def _on_cuda(choice: Choice, where: Heap, call: ScaledMatmulReduceScatterCall, rows: ScaledRows) -> Tensor:
    (k, n), shape = call.B.shape, call.local_shape(where.world_size)

    def with_scales(used: ScatterKernelCall) -> ScatterKernelCall:
        rows_of_A = 1 if rows.kind is ScaleKind.TENSOR else prod(call.whole_shape[:-1])
        a_scale = call.A_scale.reshape(rows_of_A, -1).t().contiguous()
        bias = [] if call.bias is None else [aligned(call.bias.contiguous())]
        return replace(used, terms=[a_scale, scaled_calls.scale_of_B(rows.kind, call.B_scale, k, n), *bias])

    (out,) = launch_kernel(choice, where, OP, lambda made: [made[0].view(shape)], with_scales)
    return out


SCALED_MATMUL_REDUCE_SCATTER = Op(
    "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op,"
    " int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape,"
    " Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False, *,"
    " int? group_size=None) -> Tensor",
    record=ScaledMatmulReduceScatterCall,
    validate=_validate,
    fake=lambda call, rows, group: call.A.new_empty(call.local_shape(group.size()), dtype=call.out_dtype),
    kernel="scaled_matmul_reduce_scatter",
    sends_nothing=lambda call, rows, group: 0 in call.local_shape(group.size()),
    choose=host_or(lambda call, rows, group: 4 * prod(call.local_shape(group.size())), _choose_on_cuda),
    run=_run,
    known_by=_known_by,
    with_gradient=NO_GRADIENT,
    flops=matmul_flops,
    own_dims={"A": (-1,), "B": (0,), "A_scale": (-1,), "B_scale": (0,)},
)
