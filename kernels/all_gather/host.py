"""CPU ranks: every rank writes its input into every peer's buffer, sets a flag, and takes what arrives to where it
belongs.

Who writes: rank r, its bytes into slot r of every peer's buffer, then flag 0 of rank r there. Who waits: each rank, for
every peer's flag. Inputs larger than a buffer are sent chunk by chunk.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace

OP = "one_shot_all_gather"
INTO = f"{OP}_out"
CHUNK_BYTES = 4 << 20  #: of the input that are sent in one epoch of a buffer


def host_all_gather_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for inputs of ``nbytes``."""
    return Layout(world_size, 1, world_size * min(nbytes, CHUNK_BYTES))


def host_all_gather(workspace: Workspace, x: torch.Tensor, op: str = OP) -> torch.Tensor:
    """All ranks' x, [W, n]; x: [n], contiguous. ``op``: whose call it is."""
    stacked = x.new_empty(workspace.world_size, x.numel())
    step = max(1, CHUNK_BYTES // x.element_size())
    with workspace.lock:
        for start in range(0, x.numel(), step):
            chunk = slice(start, start + step)
            _chunk(workspace, x[chunk], stacked[:, chunk], op)
    return stacked


def _chunk(workspace: Workspace, x: torch.Tensor, out: torch.Tensor, op: str) -> None:
    size, rank = workspace.world_size, workspace.rank
    with HostEpoch(workspace, op) as epoch:
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait_free(peer)
            epoch.slots(peer, (size, x.numel()), x.dtype)[rank] = x
            epoch.post(peer, 0)
        out[rank] = x
        slots = epoch.slots(rank, (size, x.numel()), x.dtype)
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait(peer, 0)
            out[peer] = slots[peer]
