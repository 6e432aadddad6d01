"""What the ops return, without data: sizes, strides and dtypes, of fake tensors and those on "meta".

They refuse what the ops refuse, in the same words (validation.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.calls import (
    AllGatherCall,
    AllGatherMatmulCall,
    AllGatherOutCall,
    AllReduceCall,
    AllReduceLayerNormCall,
    AllReduceRmsNormCall,
    AllReduceRmsNormQuantCall,
    MatmulAllReduceCall,
    MatmulReduceScatterCall,
    ReduceScatterCall,
    ReduceScatterOutCall,
)
from ..ops.scaled_calls import AllGatherScaledMatmulCall, ScaledMatmulReduceScatterCall
from . import scaled_validation, validation


def fake_all_gather_matmul(call: AllGatherMatmulCall) -> tuple[Tensor | None, list[Tensor]]:
    call, group = validation.validate_all_gather_matmul(call)
    A_shard, dim = call.A_shard, call.gather_dim
    shape = list(A_shard.shape)
    shape[dim] = shape[dim] * group.size()
    front = 0 if dim == A_shard.dim() - 1 else dim

    def out(columns: Any) -> Tensor:
        moved = [shape[front], *shape[:front], *shape[front + 1 : -1], columns]
        return A_shard.new_empty(moved).movedim(0, front)

    return (out(shape[-1]) if call.return_A else None), [out(B.shape[1]) for B in call.Bs]


def fake_matmul_reduce_scatter(call: MatmulReduceScatterCall) -> Tensor:
    call, group = validation.validate_matmul_reduce_scatter(call)
    return call.A.new_empty(call.local_shape(group.size()), dtype=call.out_dtype)


def fake_all_gather_scaled_matmul(call: AllGatherScaledMatmulCall) -> tuple[Tensor | None, list[Tensor]]:
    call, _, group = scaled_validation.validate_all_gather_scaled_matmul(call)
    A_shard, dim = call.A_shard, call.gather_dim
    shape = list(A_shard.shape)
    shape[dim] = shape[dim] * group.size()
    front = 0 if dim == A_shard.dim() - 1 else dim

    def out(columns: Any, dtype: torch.dtype | None) -> Tensor:
        moved = [shape[front], *shape[:front], *shape[front + 1 : -1], columns]
        return A_shard.new_empty(moved, dtype=dtype).movedim(0, front)

    outs = [out(B.shape[1], dtype) for B, dtype in zip(call.Bs, call.out_dtypes, strict=True)]
    return (out(shape[-1], A_shard.dtype) if call.return_A else None), outs


def fake_scaled_matmul_reduce_scatter(call: ScaledMatmulReduceScatterCall) -> Tensor:
    call, _, group = scaled_validation.validate_scaled_matmul_reduce_scatter(call)
    return call.A.new_empty(call.local_shape(group.size()), dtype=call.out_dtype)


def fake_all_reduce(call: AllReduceCall) -> Tensor:
    validation.validate_all_reduce(call)
    return torch.empty_like(call.x, memory_format=torch.contiguous_format)


def fake_all_reduce_in_place(call: AllReduceCall) -> None:
    validation.validate_all_reduce_in_place(call)


def fake_all_gather(call: AllGatherCall) -> Tensor:
    call, group = validation.validate_all_gather(call)
    return call.x.new_empty(call.whole_shape(group.size()))


def fake_all_gather_out(call: AllGatherOutCall) -> None:
    validation.validate_all_gather_out(call)


def fake_reduce_scatter(call: ReduceScatterCall) -> Tensor:
    call, group = validation.validate_reduce_scatter(call)
    return call.x.new_empty(call.part_shape(group.size()))


def fake_reduce_scatter_out(call: ReduceScatterOutCall) -> None:
    validation.validate_reduce_scatter_out(call)


def fake_all_reduce_norm(call: AllReduceRmsNormCall | AllReduceLayerNormCall) -> tuple[Tensor, Tensor]:
    validation.validate_all_reduce_norm(call)
    return call.x.new_empty(call.x.shape), call.x.new_empty(call.x.shape)


def fake_all_reduce_rms_norm_quant(
    call: AllReduceRmsNormQuantCall,
) -> tuple[Tensor, Tensor | None, Tensor]:
    call, _ = scaled_validation.validate_all_reduce_rms_norm_quant(call)
    x, scales = call.x, None
    if call.scale is None:
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=call.out_dtype), scales, x.new_empty(x.shape)


def fake_matmul_all_reduce(call: MatmulAllReduceCall) -> Tensor:
    validation.validate_matmul_all_reduce(call)
    return call.A.new_empty((*call.A.shape[:-1], call.B.shape[1]))
