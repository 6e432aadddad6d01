"""CPU ranks: every rank writes each peer's part into the peer's buffer, sets a flag, and takes what arrives.

Who writes: rank r, its part for rank q into slot r of q's buffer, then flag 0 of rank r there. Who waits: each rank,
for every peer's flag. Parts larger than a buffer are sent chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

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
            _chunk(workspace, parts[:, chunk], received[:, chunk], min(step, parts.shape[1] - start), op)
    return received


def gather_uneven(
    workspace: Workspace, x: torch.Tensor, sizes: Sequence[int], op: str, chunk_bytes: int
) -> torch.Tensor:
    """All ranks' x one after the other, [sum(sizes)]; x: [sizes[rank]]. All ranks make as many epochs as the largest
    takes."""
    out = x.new_empty(sum(sizes))
    step = max(1, chunk_bytes // x.element_size())
    with workspace.lock:
        for start in range(0, max(sizes), step):
            received = [part[start : start + step] for part in out.split([*sizes])]
            own = x[start : start + step]
            _chunk(workspace, [own] * len(sizes), received, min(step, max(sizes) - start), op)
    return out


def _chunk(
    workspace: Workspace,
    parts: torch.Tensor | Sequence[torch.Tensor],
    received: torch.Tensor | Sequence[torch.Tensor],
    longest: int,
    op: str,
) -> None:
    """Of parts and of what is received, some may be shorter than the ``longest``, which a slot holds."""
    size, rank = workspace.world_size, workspace.rank
    shape, dtype = (size, longest), parts[rank].dtype
    with HostEpoch(workspace, op) as epoch:
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait_free(peer)
            epoch.slots(peer, shape, dtype)[rank, : parts[peer].shape[0]] = parts[peer]
            epoch.post(peer, 0)
        received[rank].copy_(parts[rank])
        slots = epoch.slots(rank, shape, dtype)
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait(peer, 0)
            received[peer].copy_(slots[peer, : received[peer].shape[0]])
