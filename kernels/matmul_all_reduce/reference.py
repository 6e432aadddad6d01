"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def reference_matmul_all_reduce(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group: ProcessGroup
) -> torch.Tensor:
    """``sum over ranks of A @ B`` (``avg``: divided by their number), contiguous."""
    # A sum of float16 numbers may be too large for one where their average is not.
    wide = torch.float32 if reduce_op == "avg" and A.dtype == torch.float16 else A.dtype
    out = torch.matmul(A, B).to(wide).contiguous()
    if out.numel():
        dist.all_reduce(out, group=group)
    if reduce_op == "avg":
        out /= group.size()
    return out.to(A.dtype)
