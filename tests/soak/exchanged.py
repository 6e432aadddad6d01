"""All-to-alls, alone and around products, and the gather: the soak's calls of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from weft.fused_ops import (
    fused_all_to_all_matmul,
    fused_matmul_all_to_all,
    one_shot_all_to_all,
    one_shot_gather,
)

OF_EXCHANGES = ("all_to_all", "gather", "matmul_all_to_all", "all_to_all_matmul")


def _root(a: Tensor) -> int:
    return a.shape[-1] % a.shape[0]


def run_exchanged(
    op: str, a: Tensor, bs: list[Tensor], at: tuple[int, int], group: dist.ProcessGroup
) -> Tensor:
    """``at``: the rank, and the dimension that is gathered or scattered."""
    rank, dim = at
    if op == "all_to_all":
        return one_shot_all_to_all(a[rank], dim, 0, group)
    if op == "gather":
        return one_shot_gather(a[rank], dim, _root(a), group)
    call = fused_matmul_all_to_all if op == "matmul_all_to_all" else fused_all_to_all_matmul
    return call(a[rank], bs[0][rank], dim, group)


def expected_exchanged(op: str, a: Tensor, bs: list[Tensor], at: tuple[int, int]) -> Tensor:
    (rank, dim), size = at, a.shape[0]
    if op == "gather":
        return torch.cat(list(a), dim) if rank == _root(a) else a[0].narrow(dim, 0, 0)
    if op == "matmul_all_to_all":
        parts = [(x.float() @ b.float()).chunk(size, -1)[rank] for x, b in zip(a, bs[0], strict=True)]
        return torch.cat(parts, dim).to(a.dtype)
    exchanged = torch.cat([x.chunk(size, dim)[rank] for x in a], 0 if op == "all_to_all" else -1)
    return exchanged if op == "all_to_all" else (exchanged.float() @ bs[0][rank].float()).to(a.dtype)
