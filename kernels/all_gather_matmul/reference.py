"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The newer name of all_gather_into_tensor, which warns from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reference_all_gather_matmul(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group: ProcessGroup
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``A = all_gather(A_shard, gather_dim)`` and ``[A @ B for B in Bs]``.

    Args:
        A_shard: [..., K], ``gather_dim`` not negative.
        Bs: each [K, N_i]; for the last dimension [world_size * K, N_i].

    Returns:
        A and the products, contiguous once ``gather_dim`` is moved to the front (the last one: as they are).
    """
    world_size = group.size()
    last = gather_dim == A_shard.dim() - 1
    front = A_shard.movedim(0 if last else gather_dim, 0).contiguous()
    gathered = front.new_empty(world_size * front.shape[0], *front.shape[1:])
    if gathered.numel():
        _all_gather(gathered, front, group=group)
    if last:
        shape = (*A_shard.shape[:-1], world_size * A_shard.shape[-1])
        A = gathered.view(world_size, *A_shard.shape).movedim(0, -2).reshape(-1).view(shape)
        return A, [A @ B for B in Bs]
    flat = gathered.flatten(0, -2)
    outs = [(flat @ B).view(*gathered.shape[:-1], B.shape[1]).movedim(0, gather_dim) for B in Bs]
    return gathered.movedim(0, gather_dim), outs
