"""CPU ranks: every rank writes each rank its part (device/collective/host_exchange.py)."""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import exchange_layout, exchange_parts

OP = "one_shot_all_to_all"
CHUNK_BYTES = 4 << 20  #: of a part that are sent in one epoch of a buffer


def host_all_to_all_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for parts of ``nbytes``."""
    return exchange_layout(nbytes, world_size, CHUNK_BYTES)


def host_all_to_all(workspace: Workspace, parts: torch.Tensor, op: str = OP) -> torch.Tensor:
    """What every rank has for this one, [W, n]; parts: [W, n], the q-th for rank q. ``op``: whose call it is."""
    return exchange_parts(workspace, parts, op, CHUNK_BYTES)
