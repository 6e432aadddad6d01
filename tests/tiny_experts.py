"""Ops of mixtures of experts, small, for test_tiny.py: shapes of a rank's inputs, the op, and its float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from opcommon import world
from torch import Tensor
from weft import fused_ops

Outputs = tuple[Tensor, ...]
Case = tuple[tuple[tuple[int, ...], ...], Callable[..., Outputs], Callable[..., Outputs]]


def gathered() -> Case:
    ids = torch.tensor([[1, 0], [0, 2], [1, 3], [0, 1], [3, 1], [2, 0]])  # nobody has expert 3

    def call(shard: Tensor, *Bs: Tensor) -> Outputs:
        rows, offs, slots = fused_ops.moe_route(ids, 3)
        A, outs = fused_ops.fused_all_gather_grouped_matmul(shard, Bs, rows, offs, 0, world(), return_A=True)
        assert A is not None
        return A, *(out[slots.long()].where((slots >= 0)[..., None], 0) for out in outs)

    def reference(rank: int, shards: Sequence[Tensor], *Bs: Sequence[Tensor]) -> Outputs:
        A = torch.cat(list(shards))
        outs = [torch.einsum("tk,tjkn->tjn", A, B[rank][ids.clamp(max=2)]) for B in Bs]
        return A, *(out * (ids < 3)[..., None] for out in outs)

    return ((3, 16), (3, 16, 8), (3, 16, 24)), call, reference


def multiplied(dim: int | None) -> Case:
    """The product before it, and the sum or its part; of positive numbers, of which what is rounded before the sum does
    not cancel out."""
    ids = torch.tensor([[1, 0], [0, 2], [1, 3], [0, 1]])  # nobody has expert 3

    def call(*tensors: Tensor) -> Outputs:
        A, B, bias, weights, shared = (x.abs() for x in tensors)
        _, offs, slots = fused_ops.moe_route(ids, 3)
        given, named = (A, B, offs, slots, weights, "sum"), {"bias": bias, "shared": shared}
        if dim is None:
            return (fused_ops.fused_grouped_matmul_all_reduce(*given, world(), **named),)
        return (fused_ops.fused_grouped_matmul_reduce_scatter(*given, dim, world(), **named),)

    def reference(rank: int, *ranks: Sequence[Tensor]) -> Outputs:
        _, _, slots = fused_ops.moe_route(ids, 3)
        there, of = (ids < 3)[..., None], ids.clamp(max=2)
        *positive, shared = ([x.abs() for x in of_ranks] for of_ranks in ranks)
        total = sum(shared)
        for A, B, bias, weights in zip(*positive, strict=True):
            y = torch.einsum("tjk,tjkn->tjn", A[slots.long()], B[of]) + bias[of]
            total = total + (torch.where(there, y, 0) * weights[..., None]).sum(1)
        return (total if dim is None else total.chunk(len(ranks[0]), dim)[rank],)

    # Of 40 columns: a part has 80 numbers, over which roundings average out.
    return ((8, 16), (3, 16, 40), (3, 40), (4, 2), (4, 40)), call, reference


def sent() -> Case:
    """To experts of both ranks, one of which multiplies with -1, and back."""
    ids = torch.tensor([[0, 1], [1, -1], [1, 0], [-1, -1]])

    def call(x: Tensor, weights: Tensor) -> Outputs:
        rows, _, handle = fused_ops.moe_dispatch(x, ids, 2, world())
        y = rows if world().rank() == 0 else -rows
        return (fused_ops.moe_combine(y, handle, weights, world()),)

    def reference(rank: int, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Outputs:
        signs = torch.where(ids < 0, 0, 1 - 2 * ids)
        return (xs[rank] * (signs * weights[rank]).sum(1, keepdim=True),)

    return ((4, 40), (4, 2)), call, reference


def combined(dim: int | None, eps: float) -> Case:
    """With the norm, or a part of the sum along a dimension."""
    slots = torch.tensor([[3, 0], [1, -1], [2, 5], [4, 7]], dtype=torch.int32)

    def call(y: Tensor, weights: Tensor, shared: Tensor, *norm: Tensor) -> Outputs:
        given, named = (y, slots, weights), {"shared": shared}
        if dim is None:
            return fused_ops.fused_moe_combine_all_reduce_rms_norm(*given, *norm, eps, world(), **named)
        return (fused_ops.fused_moe_combine_reduce_scatter(*given, dim, world(), **named),)

    def reference(
        rank: int, ys: Sequence[Tensor], weights: Sequence[Tensor], *more: Sequence[Tensor]
    ) -> Outputs:
        every = zip(ys, weights, strict=True)
        rows = [(torch.cat([y, y[:1] * 0])[slots.long()] * w[..., None]).sum(1) for y, w in every]
        total = sum(rows) + sum(more[0])
        if dim is not None:
            return (total.chunk(len(ys), dim)[rank],)
        sums = total + more[1][rank]
        return sums / (sums.square().mean(-1, keepdim=True) + eps).sqrt() * more[2][rank], sums

    shapes = (9, 10), (4, 2), (4, 10), (4, 10), (10,)
    return shapes[: 5 if dim is None else 3], call, reference
