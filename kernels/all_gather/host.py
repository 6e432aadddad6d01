"""CPU ranks: every rank writes its input to every rank, as a part for each (device/collective/host_exchange.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import exchange_layout, exchange_parts, gather_uneven

OP = "one_shot_all_gather"
INTO = f"{OP}_out"
CHUNK_BYTES = 4 << 20  #: of the input that are sent in one epoch of a buffer


def host_all_gather_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for inputs of ``nbytes``."""
    return exchange_layout(nbytes, world_size, CHUNK_BYTES)


def host_all_gather(workspace: Workspace, x: torch.Tensor, op: str = OP) -> torch.Tensor:
    """All ranks' x, [W, n]; x: [n], contiguous. ``op``: whose call it is."""
    return exchange_parts(workspace, x.expand(workspace.world_size, -1), op, CHUNK_BYTES)


def host_all_gather_uneven(
    workspace: Workspace, x: torch.Tensor, sizes: Sequence[int], op: str = OP
) -> torch.Tensor:
    """All ranks' x one after the other, [sum(sizes)]; x: [sizes[rank]], contiguous. ``op``: whose call it is."""
    return gather_uneven(workspace, x, sizes, op, CHUNK_BYTES)
