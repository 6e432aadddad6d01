"""fused_scaled_matmul_reduce_scatter: from the op's tensors to the parts that travel, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.gemm.scaling import ScaleKind, exact_product, torch_product
from ...kernels.scaled_matmul_reduce_scatter import host
from ...kernels.scaled_matmul_reduce_scatter.reference import reference_scattered_sum
from ...symm_mem.heap.heap import Heap
from ..dispatch.plan import Plan, heap_or_reason, ran
from ..dispatch.workspaces import matmul_workspace
from .scaled_calls import ScaledMatmulReduceScatterCall, ScaledRows, scales_of


def run_scaled_matmul_reduce_scatter(
    call: ScaledMatmulReduceScatterCall, rows: ScaledRows, group: ProcessGroup
) -> Tensor:
    """As the op; call and rows are what validation returns."""
    shape = call.local_shape(group.size())
    found = heap_or_reason(host.OP, call.A, group, empty=0 in shape)
    if not isinstance(found, str):
        if call.A.device.type == "cpu":
            return _on_cpu(found, call, rows).view(shape)
        found = "no kernel takes fp8 operands yet"
    ran(Plan("unfused", found))
    return _unfused(call, rows, group)


def _a_scale(call: ScaledMatmulReduceScatterCall, rows: ScaledRows) -> Tensor:
    return call.A_scale if rows.kind is ScaleKind.TENSOR else call.A_scale.flatten(0, -2)


def _on_cpu(where: Heap, call: ScaledMatmulReduceScatterCall, rows: ScaledRows) -> Tensor:
    size, dim, kind, B = where.world_size, call.orig_scatter_dim, rows.kind, call.B
    k, n, (*lead, _) = B.shape[0], B.shape[1], call.whole_shape
    assert call.out_dtype is not None
    shape = call.local_shape(size)
    workspace = matmul_workspace(
        where, host.host_scaled_scatter_layout(_numel(shape), call.out_dtype.itemsize, size)
    )
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))

    def finished(a: Tensor, a_scale: Tensor) -> Tensor:
        product = exact_product(a, B, scales_of(kind, a_scale, call.B_scale, k, n))
        return product if call.bias is None else product.add_(call.bias)

    def part(x: Tensor, rank: int) -> Tensor:
        return x.reshape(*lead, x.shape[-1]).chunk(size, dim)[rank].flatten(0, -2)

    def product_for(rank: int) -> Callable[[], Tensor]:
        def product() -> Tensor:
            a_scale = call.A_scale if kind is ScaleKind.TENSOR else part(call.A_scale, rank)
            return finished(part(call.A, rank), a_scale)

        return product

    if dim == len(lead):
        whole = finished(call.A.flatten(0, -2), _a_scale(call, rows)).chunk(size, 1)
        products = [partial(whole.__getitem__, rank) for rank in range(size)]
    else:
        products = [product_for(rank) for rank in range(size)]
    return host.host_scaled_matmul_reduce_scatter(workspace, products, call.reduce_op, call.out_dtype)


def _numel(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _unfused(call: ScaledMatmulReduceScatterCall, rows: ScaledRows, group: ProcessGroup) -> Tensor:
    (k, n), out_dtype = call.B.shape, call.out_dtype
    assert out_dtype is not None
    scales = scales_of(rows.kind, _a_scale(call, rows), call.B_scale, k, n)
    a = call.A.flatten(0, -2)
    product = torch_product(a, call.B, scales, call.bias, out_dtype, fast=call.use_fast_accum)
    whole = product.view(call.whole_shape)
    return reference_scattered_sum(whole, call.reduce_op, call.orig_scatter_dim, group)
