"""CPU ranks: every rank writes each peer's part into the peer's buffer, sets a flag, and takes what arrives.

Who writes: rank r, its part for rank q into slot r of q's buffer, then flag 0 of rank r there. Who waits: each rank,
for every peer's flag. Parts larger than a buffer are sent chunk by chunk.
"""

from __future__ import annotations

import torch

from ....symm_mem.layout import Layout
from ....symm_mem.workspace import HostEpoch, Workspace


def exchange_layout(nbytes: int, world_size: int, chunk_bytes: int) -> Layout:
    """The workspace for parts of ``nbytes``, of which ``chunk_bytes`` are sent in one epoch of a buffer."""
    return Layout(world_size, 1, world_size * min(nbytes, chunk_bytes))


def exchange_parts(workspace: Workspace, parts: torch.Tensor, op: str, chunk_bytes: int) -> torch.Tensor:
    """What every rank has for this one, [W, n]; parts: [W, n], the q-th for rank q. ``op``: whose call it is."""
    received = parts.new_empty(parts.shape)
    step = max(1, chunk_bytes // parts.element_size())
    with workspace.lock:
        for start in range(0, parts.shape[1], step):
            chunk = slice(start, start + step)
            _chunk(workspace, parts[:, chunk], received[:, chunk], op)
    return received


def _chunk(workspace: Workspace, parts: torch.Tensor, received: torch.Tensor, op: str) -> None:
    size, rank = workspace.world_size, workspace.rank
    shape, dtype = tuple(parts.shape), parts.dtype
    with HostEpoch(workspace, op) as epoch:
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait_free(peer)
            epoch.slots(peer, shape, dtype)[rank] = parts[peer]
            epoch.post(peer, 0)
        received[rank] = parts[rank]
        slots = epoch.slots(rank, shape, dtype)
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait(peer, 0)
            received[peer] = slots[peer]
