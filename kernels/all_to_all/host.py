"""CPU ranks: every rank writes each rank its part (device/collective/host_exchange.py)."""

from __future__ import annotations

import torch

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import exchange_into

OP = "one_shot_all_to_all"


def host_all_to_all(workspace: Workspace, parts: torch.Tensor, op: str = OP) -> torch.Tensor:
    """What every rank has for this one, [W, n]; parts: [W, n], the q-th for rank q. ``op``: whose call it is."""
    received = torch.empty_like(parts)
    exchange_into(workspace, parts.unbind(), received.unbind(), op)
    return received
