"""What the ops return, without data: sizes, strides and dtypes, of fake tensors and those on "meta".

They refuse what the ops refuse, in the same words (validation.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import validation


def fake_all_gather_matmul(
    A_shard: Tensor,
    Bs: list[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
    group_size: int | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    validation.group_size(group_size, group_name)
    dim, group = validation.validate_all_gather_matmul(A_shard, Bs, gather_dim, group_name)
    shape = list(A_shard.shape)
    shape[dim] = shape[dim] * group.size()
    front = 0 if dim == A_shard.dim() - 1 else dim

    def out(columns: Any) -> Tensor:
        moved = [shape[front], *shape[:front], *shape[front + 1 : -1], columns]
        return A_shard.new_empty(moved).movedim(0, front)

    return (out(shape[-1]) if return_A else None), [out(B.shape[1]) for B in Bs]


def fake_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    validation.group_size(group_size, group_name)
    args = (A, B, reduce_op, scatter_dim, group_name, out_dtype, bias, residual)
    dim, group = validation.validate_matmul_reduce_scatter(*args)
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] = shape[dim] // group.size()
    return A.new_empty(shape, dtype=out_dtype or A.dtype)


def fake_all_reduce(x: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None) -> Tensor:
    validation.group_size(group_size, group_name)
    validation.validate_all_reduce(x, reduce_op, group_name)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_all_reduce_in_place(
    x: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> None:
    validation.group_size(group_size, group_name)
    validation.validate_all_reduce_in_place(x, reduce_op, group_name)


def fake_all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group_name: str,
    *,
    group_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    validation.group_size(group_size, group_name)
    validation.validate_all_reduce_rms_norm(x, residual, weight, eps, group_name)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def fake_matmul_all_reduce(
    A: Tensor, B: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> Tensor:
    validation.group_size(group_size, group_name)
    validation.validate_matmul_all_reduce(A, B, reduce_op, group_name)
    return A.new_empty((*A.shape[:-1], B.shape[1]))
