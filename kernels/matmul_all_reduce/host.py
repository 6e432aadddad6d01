"""CPU ranks: partial results are exchanged in float32, and added up in rank order."""

from __future__ import annotations

import torch

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import reduce_parts

OP = "fused_matmul_all_reduce"


def host_matmul_all_reduce(
    workspace: Workspace, a: torch.Tensor, b: torch.Tensor, reduce_op: str
) -> torch.Tensor:
    """``sum over ranks of a @ b`` for a [m, K] and b [K, n]: the same bits on every rank."""
    workspace.begins(OP)
    product = torch.mm(a.float(), b.float())
    total = torch.empty_like(product)
    reduce_parts(workspace, [product.view(-1)] * workspace.world_size, total.view(-1), reduce_op, OP)
    return total.to(a.dtype)
