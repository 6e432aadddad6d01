"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def reference_all_to_all(parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """What every rank has for this one; parts: [W, bytes], contiguous, the q-th for rank q."""
    received = torch.empty_like(parts)
    if parts.numel():
        dist.all_to_all_single(received, parts, group=group)
    return received
