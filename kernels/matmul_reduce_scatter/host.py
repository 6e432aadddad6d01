"""CPU ranks: partial results leave through a copy thread while the next ones are computed; the local one comes last.

Who writes: rank r computes its partial result for rank d = r+1, r+2, ... and its copy thread puts it into slot r of
d's buffer, then sets flag 0 of rank r there. Who waits: d, for all flags, after it has computed its own partial
result. The sum is taken in float32, in rank order, and bias and residual are added to it.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.copy_thread import sum_of_products

OP = "fused_matmul_reduce_scatter"


def host_scatter_layout(rows: int, n: int, itemsize: int, world_size: int) -> Layout:
    """The workspace; ``rows`` x ``n`` is the result's size."""
    return Layout(world_size, 1, world_size * rows * n * itemsize)


def host_matmul_reduce_scatter(
    workspace: Workspace,
    parts: list[tuple[torch.Tensor, torch.Tensor]],
    reduce_op: str,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over ranks of the partial results for this one.

    Args:
        parts: for each rank the factors of what it shall own: [rows, K] and [K, n].
        bias, residual: [n] and [rows, n], of this rank.

    Returns:
        [rows, n] of ``out_dtype``.
    """
    dtype = parts[0][0].dtype

    def product_for(peer: int) -> torch.Tensor:
        a, b = parts[peer]
        if peer != workspace.rank:
            return torch.mm(a, b)
        return torch.mm(a.float(), b.float()) if dtype != torch.float32 else torch.mm(a, b)

    total = sum_of_products(workspace, OP, product_for, reduce_op, dtype)
    for term in (bias, residual):
        if term is not None:
            total += term
    return total.to(out_dtype)
