"""CPU ranks: shards are exchanged, then multiplied."""

from __future__ import annotations

import torch

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import gather

OP = "fused_all_gather_matmul"


def host_all_gather_matmul(
    workspace: Workspace, a: torch.Tensor, bs: list[torch.Tensor], *, split_k: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered shards and their products.

    Args:
        a: the local shard, [m, K], contiguous.
        bs: each [K, N_i]; with ``split_k`` [world_size * K, N_i].
        split_k: shards lie side by side: ``A = cat(shards, 1)``, and the products add up over them.

    Returns:
        [world_size, m, K] and each [world_size * m, N_i] (``split_k``: [m, N_i]).
    """
    m, k = a.shape
    gathered = gather(workspace, a.view(-1), OP).view(workspace.world_size, m, k)
    if split_k:
        return gathered, [_sum_of_products(gathered, b.split(k)) for b in bs]
    return gathered, [torch.mm(gathered.flatten(0, 1), b) for b in bs]


def _sum_of_products(shards: torch.Tensor, bs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """In rank order, so that ranks with equal ``bs`` get equal bits, and in float32."""
    # From 0.0 on, a sum of -0.0 would be 0.0.
    total = torch.mm(shards[0].float(), bs[0].float())
    for shard, b in zip(shards[1:], bs[1:], strict=True):
        total += torch.mm(shard.float(), b.float())
    return total.to(shards.dtype)
