"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The newer name of all_gather_into_tensor, which warns from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Contiguous x as one row of bytes: a view."""
    # Of a dimension of size 1 the stride may be any, with which no other dtype can be viewed.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def reference_all_gather(x: torch.Tensor, gather_dim: int, group: ProcessGroup) -> torch.Tensor:
    """All ranks' x, one after the other along ``gather_dim``, which is not negative; contiguous."""
    world_size = group.size()
    shape = list(x.shape)
    shape[gather_dim] *= world_size
    source = x.contiguous()
    stacked = source.new_empty(world_size, *source.shape)
    if stacked.numel():
        # As bytes: backends do not know every dtype.
        _all_gather(as_bytes(stacked), as_bytes(source), group=group)
    return stacked.movedim(0, gather_dim).reshape(-1).view(shape)


def reference_all_gather_uneven(x: torch.Tensor, sizes: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    """All ranks' x one after the other, [sum(sizes)]; x: [sizes[rank]], bytes. By a broadcast of each, which every
    backend has."""
    out = x.new_empty(sum(sizes))
    parts = out.split([*sizes])
    parts[group.rank()].copy_(x)
    for rank, part in enumerate(parts):
        if len(part) and group.size() > 1:
            dist.broadcast(part, group=group, group_src=rank)
    return out


def reference_gather(x: torch.Tensor, sizes: Sequence[int], root: int, group: ProcessGroup) -> torch.Tensor:
    """The same on rank ``root`` alone, none on the others. By an all-to-all, which backends have for any sizes."""
    rank, size = group.rank(), group.size()
    received = [*sizes] if rank == root else [0] * size
    out = x.new_empty(sum(received))
    if size == 1:
        return out.copy_(x)
    dist.all_to_all_single(out, x, received, [len(x) if r == root else 0 for r in range(size)], group=group)
    return out
