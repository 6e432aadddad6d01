"""All-to-alls, alone and around products, and the gather, small, for test_tiny.py: shapes of a rank's inputs, the op,
and its float64 reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opcommon import world
from tiny_experts import Case, Outputs
from torch import Tensor
from weft import fused_ops


def all_to_all(scatter_dim: int, gather_dim: int) -> Case:
    def call(x: Tensor) -> Outputs:
        return (fused_ops.one_shot_all_to_all(x, scatter_dim, gather_dim, world()),)

    def reference(rank: int, xs: Sequence[Tensor]) -> Outputs:
        return (torch.cat([x.chunk(len(xs), scatter_dim)[rank] for x in xs], gather_dim),)

    return ((6, 3, 10),), call, reference


def gathered_to_one(dim: int) -> Case:
    def call(x: Tensor) -> Outputs:
        return (fused_ops.one_shot_gather(x, dim, 1, world()),)

    def reference(rank: int, xs: Sequence[Tensor]) -> Outputs:
        return (torch.cat(list(xs), dim) if rank == 1 else xs[0].narrow(dim, 0, 0),)

    return ((7, 3, 5),), call, reference


def matmul_all_to_all() -> Case:
    def call(A: Tensor, B: Tensor) -> Outputs:
        return (fused_ops.fused_matmul_all_to_all(A, B, 0, world()),)

    def reference(rank: int, A: Sequence[Tensor], B: Sequence[Tensor]) -> Outputs:
        parts = [(a @ b).chunk(len(A), -1)[rank] for a, b in zip(A, B, strict=True)]
        return (torch.cat(parts),)

    return ((3, 5, 17), (17, 22)), call, reference


def matmul_all_gather() -> Case:
    def call(A: Tensor, B: Tensor) -> Outputs:
        return (fused_ops.fused_matmul_all_gather(A, B, world()),)

    def reference(rank: int, A: Sequence[Tensor], B: Sequence[Tensor]) -> Outputs:
        return (torch.cat([a @ b for a, b in zip(A, B, strict=True)], -1),)

    return ((3, 5, 17), (17, 11)), call, reference


def all_to_all_matmul() -> Case:
    def call(A: Tensor, B: Tensor) -> Outputs:
        return (fused_ops.fused_all_to_all_matmul(A, B, 1, world()),)

    def reference(rank: int, A: Sequence[Tensor], B: Sequence[Tensor]) -> Outputs:
        return (torch.cat([a.chunk(len(A), 1)[rank] for a in A], -1) @ B[rank],)

    return ((3, 6, 17), (34, 11)), call, reference
