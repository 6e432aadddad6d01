"""CPU ranks: every rank writes a part into each peer's buffer and sets a flag; later it takes what has arrived.

Who writes: rank r, its part for rank q into slot r - (r > q) of the buffer of q, then flag 0 of rank r there. Who
waits: each rank, for the flag of every peer. ``send`` begins an epoch of a buffer, ``received`` ends it; what runs
concurrently lies between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace


def async_layout(part_bytes: int, world_size: int, with_own: bool) -> Layout:
    """The workspace for parts of ``part_bytes``. ``with_own``: this rank's own has a slot, too: slot r is rank r's."""
    return Layout(world_size, 1, (world_size - 1 + with_own) * part_bytes)


def send(
    workspace: Workspace[Layout], buffer: int, parts: Sequence[torch.Tensor], op: str, *, with_own: bool
) -> HostEpoch:
    """Send ``parts[q]``, bytes, to each rank q. ``op``: whose call it is."""
    size, rank = workspace.world_size, workspace.rank
    with workspace.lock:
        epoch = HostEpoch(workspace, op, buffer)
        try:
            for step in range(1, size):
                peer = (rank + step) % size
                epoch.wait_free(peer)
                slots = _slots(workspace, peer, buffer, parts[peer], with_own)
                slots[rank if with_own else rank - (rank > peer)] = parts[peer]
                epoch.post(peer, 0)
            if with_own:
                _slots(workspace, rank, buffer, parts[rank], True)[rank] = parts[rank]
        except BaseException as e:
            workspace.abandon(e)
            raise
    return epoch


def arrive(workspace: Workspace[Layout], epoch: HostEpoch) -> None:
    """Wait for the parts of all peers."""
    with workspace.lock:
        for step in range(1, workspace.world_size):
            epoch.wait((workspace.rank + step) % workspace.world_size, 0)


def received(workspace: Workspace[Layout], epoch: HostEpoch, own: torch.Tensor) -> list[torch.Tensor]:
    """The parts, bytes, of all ranks for this one, whose own is ``own``; in new memory. Ends the epoch."""
    size, rank = workspace.world_size, workspace.rank
    with workspace.lock, epoch:
        arrive(workspace, epoch)
        slots = _slots(workspace, rank, epoch.buffer, own, False)
        return [own if p == rank else slots[p - (p > rank)].clone() for p in range(size)]


def _slots(
    workspace: Workspace[Layout], rank: int, buffer: int, part: torch.Tensor, with_own: bool
) -> torch.Tensor:
    shape = (workspace.world_size - 1 + with_own, part.numel())
    return workspace.buffer(rank, buffer, shape, torch.uint8)
