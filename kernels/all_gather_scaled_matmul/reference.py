"""The collective before the unfused products, in plain torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The newer name of all_gather_into_tensor, which warns from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reference_gathered_rows(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Every rank's rows [m, K], of any dtype, as [W, m, K]. They go as bytes, which every backend knows."""
    # One row of bytes: of a dimension of size 1 the stride may be any, with which no other dtype can be viewed.
    mine = rows.contiguous().as_strided((rows.numel(),), (1,)).view(torch.uint8)
    out = mine.new_empty(group.size() * mine.numel())
    if out.numel():
        _all_gather(out, mine, group=group)
    return out.view(rows.dtype).view(group.size(), *rows.shape)
