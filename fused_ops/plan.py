"""Plan once, run often: what a call costs is looking its plan up, fetching its workspace and launching.

A plan is a choice of algorithm, made from what is known without data: shapes, strides, dtypes, the group. It is the same on
every rank, because all of these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.all_gather_matmul import host as ag_host
from ..kernels.all_gather_matmul.reference import all_gather_matmul as unfused_all_gather_matmul
from ..kernels.all_reduce import host as ar_host
from ..kernels.all_reduce.reference import all_reduce as unfused_all_reduce
from ..kernels.matmul_reduce_scatter import host as rs_host
from ..kernels.matmul_reduce_scatter.reference import matmul_reduce_scatter as unfused_matmul_reduce_scatter
from ..symm_mem import HeapUnavailable, heap
from .workspaces import gemm_workspace


@dataclass(frozen=True)
class Plan:
    """``algorithm`` as in the bench's tables; ``reason`` says why when it is "unfused"."""

    algorithm: str
    reason: str = ""


_last = Plan("none")


def last_plan() -> Plan:
    """The plan of this process's last call of an op."""
    return _last


def _choose(device: torch.device, group: ProcessGroup, empty: bool) -> Plan:
    global _last
    if group.size() == 1:
        _last = Plan("unfused", "the group has one rank")
    elif empty:
        _last = Plan("unfused", "there is nothing to send")
    else:
        try:
            heap(group, device)
            _last = Plan("host")
        except HeapUnavailable as e:
            _last = Plan("unfused", str(e))
    return _last


def run_all_gather_matmul(
    A_shard: Tensor, Bs: list[Tensor], dim: int, group: ProcessGroup, return_A: bool
) -> tuple[Tensor | None, list[Tensor]]:
    plan = _choose(A_shard.device, group, A_shard.numel() == 0)
    if plan.algorithm == "unfused":
        A, outs = unfused_all_gather_matmul(A_shard, Bs, dim, group)
        return (A if return_A else None), outs
    size, split_k = group.size(), dim == A_shard.dim() - 1
    moved = A_shard if split_k else A_shard.movedim(dim, 0)
    a = moved.reshape(-1, A_shard.shape[-1]).contiguous()
    workspace = gemm_workspace(heap(group, a.device), *ag_host.needs(*a.shape, a.element_size(), size))
    gathered, products = ag_host.all_gather_matmul(workspace, a, Bs, split_k=split_k)
    if split_k:
        A = gathered.movedim(0, 1).reshape(*A_shard.shape[:-1], -1)
        return (A if return_A else None), [p.view(*A_shard.shape[:-1], -1) for p in products]

    def shaped(flat: Tensor) -> Tensor:
        return flat.view(size * moved.shape[0], *moved.shape[1:-1], flat.shape[-1]).movedim(0, dim)

    return (shaped(gathered.flatten(0, 1)) if return_A else None), [shaped(p) for p in products]


def run_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, dim: int, group: ProcessGroup) -> Tensor:
    size = group.size()
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] //= size
    plan = _choose(A.device, group, 0 in shape)
    if plan.algorithm == "unfused":
        return unfused_matmul_reduce_scatter(A, B, reduce_op, dim, group)
    if dim == A.dim() - 1:
        rows = A.reshape(-1, A.shape[-1])
        parts = [(rows, b) for b in B.chunk(size, 1)]
    else:
        parts = [(a.reshape(-1, A.shape[-1]), B) for a in A.chunk(size, dim)]
    m, n = parts[0][0].shape[0], parts[0][1].shape[1]
    workspace = gemm_workspace(heap(group, A.device), *rs_host.needs(m, n, A.element_size(), size))
    return rs_host.matmul_reduce_scatter(workspace, parts, reduce_op).view(shape)


def run_all_reduce(x: Tensor, reduce_op: str, group: ProcessGroup) -> Tensor:
    plan = _choose(x.device, group, x.numel() == 0)
    if plan.algorithm == "unfused":
        return unfused_all_reduce(x, reduce_op, group)
    flat = x.reshape(-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    workspace = gemm_workspace(heap(group, x.device), *ar_host.needs(flat.nbytes, group.size()))
    ar_host.all_reduce(workspace, flat, out.view(-1), reduce_op)
    return out
