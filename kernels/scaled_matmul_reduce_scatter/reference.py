"""The collective after the unfused product, in plain torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The newer name of reduce_scatter_tensor, which warns from torch 2.13 on.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reference_scattered_sum(
    partial: torch.Tensor, reduce_op: str, scatter_dim: int, group: ProcessGroup
) -> torch.Tensor:
    """The own part of the sum, or the average, over ranks of ``partial``, cut along ``scatter_dim``; contiguous."""
    dtype, average = partial.dtype, reduce_op == "avg"
    # A sum of float16 numbers may be too large for one where their average is not.
    front = partial.float() if average and dtype == torch.float16 else partial
    front = front.movedim(scatter_dim, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size(), *front.shape[1:])
    if out.numel():
        _reduce_scatter(out, front, group=group)
    if average:
        out /= group.size()
    return out.to(dtype).movedim(0, scatter_dim).contiguous()
