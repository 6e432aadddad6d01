"""fused_all_gather_scaled_matmul: from the op's tensors to the rows and scales that travel, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather_matmul.configs import MOST_BS, GatherKernelCall, GatherScales
from ...kernels.device.gemm.scaling import (
    BLOCK,
    ScaledProducts,
    ScaleKind,
    as_pairs,
    exact_product,
    has_block_product,
    torch_product,
)
from ...kernels.device.gemm.supported import why_last_dim_not_gathered
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import scaled_calls, validation
from ..dispatch.choice import Choice, Known, choose_kernel, host_or, launch_kernel, unfused
from ..dispatch.plan import num_sms, preferred_between
from ..dispatch.staging import Staging, aligned, rows_of
from ..scaled_calls import NO_GRADIENT, AllGatherScaledMatmulCall, ScaledGather, ScaledRows
from . import all_gather_matmul
from .all_gather import AllGatherCall, run_all_gather
from .op import Op

OP = "fused_all_gather_scaled_matmul"
Result: TypeAlias = tuple[Tensor | None, list[Tensor]]


def _validate(call: AllGatherScaledMatmulCall) -> tuple[AllGatherScaledMatmulCall, ScaledRows, ProcessGroup]:
    """The call with a dimension that is not negative and the dtypes of its results; how A is scaled; the group."""
    group, A = resolve_group(call.group_name), call.A_shard
    scaled_calls.validate_operand("A_shard", A)
    validation.dimension("gather_dim", call.gather_dim, "A_shard", A.dim())
    dim, (*lead, k) = call.gather_dim % A.dim(), A.shape
    if not call.Bs:
        raise ValueError("Bs: is empty, must hold at least one matrix")
    for name in ("B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum"):
        if len(given := getattr(call, name)) != len(call.Bs):
            raise ValueError(f"{name}: has {len(given)} elements, must have {len(call.Bs)}, as many as Bs")
    last = dim == A.dim() - 1
    for i, B in enumerate(call.Bs):
        scaled_calls.validate_scaled_matrix(f"Bs[{i}]", B, k * group.size() if last else k, A, "A_shard")
    scaled_calls.validate_scale("A_scale", call.A_scale, A, "A_shard")
    whole = [size * group.size() if i == dim else size for i, size in enumerate(lead)]
    rows = scaled_calls.scaled_rows(call.A_scale, lead, k, whole)
    if last and rows.kind is ScaleKind.BLOCKS and k % BLOCK:
        raise ValueError(
            f"gather_dim: is the last dimension, of {k}, which must be a multiple of {BLOCK} for block-wise scales"
        )
    out_dtypes = [scaled_calls.output_dtype(f"out_dtypes[{i}]", x) for i, x in enumerate(call.out_dtypes)]
    for i, (B, scale) in enumerate(zip(call.Bs, call.B_scales, strict=True)):
        scaled_calls.validate_scale(f"B_scales[{i}]", scale, A, "A_shard")
        scaled_calls.validate_scale_of_B(f"B_scales[{i}]", scale, rows, call.A_scale, B)
        scaled_calls.validate_bias(f"biases[{i}]", call.biases[i], B.shape[1], out_dtypes[i], A)
        scaled_calls.validate_result_scale(f"result_scales[{i}]", call.result_scales[i], A)
    return call._replace(gather_dim=dim, out_dtypes=out_dtypes), rows, group


def _known_by(call: AllGatherScaledMatmulCall) -> Known:
    """A dtype may be a number here (scaled_calls.py)."""
    # Loops take less time than ``any``.
    for scale in call.result_scales:
        if scale is not None:
            return None
    dtypes = (*map(scaled_calls.dtype_of, call.out_dtypes),)
    for dtype in dtypes:
        if type(dtype) is not torch.dtype:
            return None
    for fast in call.use_fast_accum:
        if type(fast) is not bool:
            return None
    biased = tuple([bias is not None for bias in call.biases])
    counts = len(call.Bs), len(call.B_scales)
    arguments = call.gather_dim, call.return_A, counts, dtypes, (*call.use_fast_accum,), biased
    added = [bias for bias in call.biases if bias is not None]
    return arguments, (call.A_shard, *call.Bs, call.A_scale, *call.B_scales, *added)


def _host_bytes(call: AllGatherScaledMatmulCall, rows: ScaledRows, group: ProcessGroup) -> int:
    gather = ScaledGather(call, rows, group.size())
    return max(gather.a.nbytes, 0 if gather.sent is None else gather.sent.nbytes)


def _run(
    choice: Choice, where: Heap, call: AllGatherScaledMatmulCall, rows: ScaledRows, group: ProcessGroup
) -> Result:
    """As the op; call and rows are what validation returns."""
    gather = ScaledGather(call, rows, group.size())
    if choice.algorithm in ("host", "unfused"):
        return _gathered_first(choice, where, gather, group)
    return _on_cuda(choice, where, gather)


def _scaled_products(gather: ScaledGather) -> ScaledProducts | str:
    """What a kernel is to compute, or why none does."""
    call, kind = gather.call, gather.rows.kind
    dtype = call.out_dtypes[0]
    assert dtype is not None
    if len({*call.out_dtypes}) > 1 or len({B.dtype for B in call.Bs}) > 1:
        return "Bs or results of several dtypes, of which a kernel takes one"
    if len(call.Bs) > MOST_BS:
        return f"{len(call.Bs)} Bs, of which a kernel takes {MOST_BS}"
    types = gather.a.dtype, call.Bs[0].dtype
    products = ScaledProducts(
        types=types,
        kind=kind,
        out_dtype=dtype,
        promote=kind is ScaleKind.BLOCKS or not all(call.use_fast_accum),
        travels=gather.sent is not None,
        torch_has_blocks=has_block_product(gather.size * gather.m, types, gather.a.device),
    )
    reason = why_last_dim_not_gathered(products) if gather.last else None
    return products if reason is None else reason


def _choose_on_cuda(call: AllGatherScaledMatmulCall, rows: ScaledRows, group: ProcessGroup) -> Choice:
    from ...kernels.all_gather_matmul import on_cuda

    gather = ScaledGather(call, rows, group.size())
    products = _scaled_products(gather)
    if isinstance(products, str):
        return unfused(products)
    staging = Staging()
    pairs = as_pairs(gather.front, products.pairs)
    a = staging.take("A_shard", pairs, rows_of, on_cuda.takes_rows)
    bs = [staging.take(f"Bs[{i}]", as_pairs(B.t(), products.pairs)).t() for i, B in enumerate(call.Bs)]
    preferred = preferred_between(group, a.device, (group.size() - 1) * a.nbytes)
    used = GatherKernelCall(
        *(a, bs, num_sms(a.device), gather.last, call.return_A, preferred), scaled=products
    )
    too_little = scaled_calls.why_unfused(products, "gathered and multiplied")
    return choose_kernel(on_cuda.GATHER_STEPS, used, staging, group, too_little)


def _on_cuda(choice: Choice, where: Heap, gather: ScaledGather) -> Result:
    call = gather.call

    def with_scales(used: GatherKernelCall) -> GatherKernelCall:
        scales = GatherScales(
            a=aligned(gather.given.t().contiguous()),
            bs=[
                scaled_calls.scale_of_B(gather.rows.kind, scale, gather.k, B.shape[1])
                for scale, B in zip(call.B_scales, call.Bs, strict=True)
            ],
            biases=[None if bias is None else aligned(bias.contiguous()) for bias in call.biases],
        )
        return replace(used, scales=scales)

    def shaped(written: list[Tensor]) -> list[Tensor]:
        if call.return_A:
            written[-1] = written[-1].view(gather.a.dtype)
        return [gather.shaped(flat if gather.last else flat.flatten(0, 1)) for flat in written]

    outs = launch_kernel(choice, where, OP, shaped, with_scales)
    return (outs.pop() if call.return_A else None), outs


def _sum_of_parts(gather: ScaledGather, i: int, gathered: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """In rank order, so that ranks with equal Bs get equal bits, and in float32."""
    total = gather.exact(i, 0, gathered[0], scales[0])
    for src in range(1, gather.size):
        total += gather.exact(i, src, gathered[src], scales[src])
    return total


def _gathered_first(choice: Choice, where: Heap, gather: ScaledGather, group: ProcessGroup) -> Result:
    """Unfused, or between CPU ranks, whose products are exact."""
    call, kind, exact = gather.call, gather.rows.kind, choice.algorithm == "host"

    def every(rows: Tensor) -> Tensor:
        """All ranks' rows [m, K], as [W, m, K]."""
        of_rows = AllGatherCall(rows.unsqueeze(0), 0, call.group_name)
        return run_all_gather(choice, where, of_rows, group, op=OP)

    gathered, arrived = every(gather.a), None
    if gather.sent is not None and kind is ScaleKind.BLOCKS:  # rows contiguous, as torch's product wants them
        arrived = every(gather.sent.t()).movedim(0, 1).contiguous().permute(1, 2, 0)
    elif gather.sent is not None:
        arrived = every(gather.sent)
    outs = []
    for i, (B, dtype, bias) in enumerate(zip(call.Bs, call.out_dtypes, call.biases, strict=True)):
        assert dtype is not None
        if gather.last:
            total = _sum_of_parts(gather, i, gathered, gather.scales_of_ranks(arrived))
            outs.append(gather.shaped(gather.finished(i, total)))
            continue
        a_scale = gather.given if arrived is None else arrived.flatten(0, 1)
        scales = scaled_calls.scales_of(kind, a_scale, call.B_scales[i], gather.k, B.shape[1])
        operands = gathered.flatten(0, 1), B, scales
        if exact:
            out = gather.finished(i, exact_product(*operands))
        else:
            out = torch_product(*operands, bias, dtype, fast=call.use_fast_accum[i])
        outs.append(gather.shaped(out))
    return (gather.shaped_A(gathered) if call.return_A else None), outs


def _fake(call: AllGatherScaledMatmulCall, rows: ScaledRows, group: ProcessGroup) -> Result:
    out = partial(all_gather_matmul.empty_gathered, call.A_shard, call.gather_dim, group)
    outs = [out(B.shape[1], dtype) for B, dtype in zip(call.Bs, call.out_dtypes, strict=True)]
    return (out(None, call.A_shard.dtype) if call.return_A else None), outs


ALL_GATHER_SCALED_MATMUL = Op(
    "fused_all_gather_scaled_matmul(Tensor A_shard, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim,"
    " str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum, *,"
    " bool return_A=True, int? group_size=None) -> (Tensor?, Tensor[])",
    record=AllGatherScaledMatmulCall,
    validate=_validate,
    fake=_fake,
    kernel="all_gather_scaled_matmul",
    choose=host_or(_host_bytes, _choose_on_cuda),
    run=_run,
    known_by=_known_by,
    with_gradient=NO_GRADIENT,
    flops=lambda A, Bs, *given, **_: all_gather_matmul.gathered_matmul_flops(A, Bs, *given[2:4]),
    own_dims={"Bs": (1,), "B_scales": (-1,), "biases": (-1,), "result_scales": (-1,)},
)
