"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The newer name of reduce_scatter_tensor, which warns from torch 2.13 on.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reference_reduce_scatter(
    x: torch.Tensor, reduce_op: str, scatter_dim: int, group: ProcessGroup
) -> torch.Tensor:
    """The own part of ``sum over ranks of x`` (``avg``: divided by their number), or of their ``max`` or ``min``, cut
    along ``scatter_dim``, which is not negative; contiguous."""
    world_size = group.size()
    shape = list(x.shape)
    shape[scatter_dim] //= world_size
    # A sum of float16 numbers may be too large for one where their average is not.
    wide = torch.float32 if reduce_op == "avg" and x.dtype == torch.float16 else x.dtype
    parts = x.unflatten(scatter_dim, (world_size, shape[scatter_dim])).movedim(scatter_dim, 0)
    source = parts.to(wide).contiguous()
    out = source.new_empty(shape)
    if out.numel():
        _reduce_scatter(out.view(-1), source.view(-1), op=_OPS.get(reduce_op, dist.ReduceOp.SUM), group=group)
    if reduce_op == "avg":
        out /= world_size
    return out.to(x.dtype)


def reference_reduce_scatter_uneven(
    parts: Sequence[torch.Tensor], reduce_op: str, group: ProcessGroup
) -> torch.Tensor:
    """The same of one part for each rank, of lengths that are the same on every rank. By a reduction to each, which
    every backend has."""
    dtype, size = parts[0].dtype, group.size()
    wide = torch.float32 if reduce_op == "avg" and dtype == torch.float16 else dtype
    sums = [part.to(wide, copy=True, memory_format=torch.contiguous_format) for part in parts]
    for rank, part in enumerate(sums):
        if part.numel() and size > 1:
            dist.reduce(part, op=_OPS.get(reduce_op, dist.ReduceOp.SUM), group=group, group_dst=rank)
    out = sums[group.rank()]
    return (out / size if reduce_op == "avg" else out).to(dtype)
