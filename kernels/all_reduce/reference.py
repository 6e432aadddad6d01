"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def reference_all_reduce(x: torch.Tensor, reduce_op: str, group: ProcessGroup) -> torch.Tensor:
    """``sum over ranks of x`` (``avg``: divided by their number), or ``max`` or ``min``, NaN if one is; contiguous."""
    # A sum of float16 numbers may be too large for one where their average is not.
    wide = torch.float32 if reduce_op == "avg" and x.dtype == torch.float16 else x.dtype
    out = x.to(wide, copy=True, memory_format=torch.contiguous_format)
    if out.numel():
        op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(reduce_op, dist.ReduceOp.SUM)
        # Backends lose a NaN by the order of their operands: gloo in half of the positions.
        is_nan = out.isnan().to(torch.uint8) if reduce_op in ("max", "min") else None
        dist.all_reduce(out, op=op, group=group)
        if is_nan is not None:
            dist.all_reduce(is_nan, op=dist.ReduceOp.MAX, group=group)
            out.masked_fill_(is_nan.bool(), float("nan"))
    if reduce_op == "avg":
        out /= group.size()
    return out.to(x.dtype)
