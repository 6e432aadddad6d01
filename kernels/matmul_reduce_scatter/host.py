"""CPU ranks: partial results are exchanged, and summed in float32 and in rank order; bias and residual are added."""

from __future__ import annotations

import torch

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import sum_of_products

OP = "fused_matmul_reduce_scatter"


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
    workspace.begins(OP)
    products = []
    for rank, (a, b) in enumerate(parts):
        products.append(torch.mm(a.float(), b.float()) if rank == workspace.rank else torch.mm(a, b))
    total = sum_of_products(workspace, OP, products, reduce_op, parts[0][0].dtype)
    for term in (bias, residual):
        if term is not None:
            total += term
    return total.to(out_dtype)
