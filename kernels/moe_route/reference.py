"""What moe_route computes, with plain torch. Nothing of it waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_EXPERTS = 2048  #: of a rank, whose counts of every warp lie in shared memory on CUDA


def reference_route(ids: Tensor, first_expert: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows [T * k], offs [count] and slots [T, k], int32, of ids [T, k] and this rank's ``count`` experts."""
    choices = ids.numel()
    local = ids.reshape(-1).long() - first_expert
    local = local.where((local >= 0) & (local < count), count)
    found, order = local.sort(stable=True)
    offs = torch.searchsorted(found, torch.arange(count, device=ids.device), right=True)
    here = found < count
    # `order` names each choice once, so no two rows are written to one place.
    slots = torch.empty_like(order).scatter_(
        0, order, torch.arange(choices, device=ids.device).where(here, -1)
    )
    rows = (order // max(ids.shape[1], 1)).where(here, 0)
    return rows.int(), offs.int(), slots.view(ids.shape).int()
