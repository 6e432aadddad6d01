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
    exchange_uneven(workspace, parts.unbind(), received.unbind(), parts.shape[1], op, chunk_bytes)
    return received


def gather_uneven(
    workspace: Workspace, x: torch.Tensor, sizes: Sequence[int], op: str, chunk_bytes: int
) -> torch.Tensor:
    """All ranks' x one after the other, [sum(sizes)]; x: [sizes[rank]]."""
    out = x.new_empty(sum(sizes))
    exchange_uneven(workspace, [x] * len(sizes), out.split([*sizes]), max(sizes), op, chunk_bytes)
    return out


def exchange_uneven(
    workspace: Workspace,
    parts: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    longest: int,
    op: str,
    chunk_bytes: int,
) -> None:
    """Sends each rank its part, and fills what is received of each. Lengths may differ: all ranks make as many epochs
    as the ``longest`` of all takes."""
    step = max(1, chunk_bytes // parts[workspace.rank].element_size())
    with workspace.lock:
        for start in range(0, longest, step):
            chunk = slice(start, start + step)
            cut = [part[chunk] for part in parts], [part[chunk] for part in received]
            _chunk(workspace, *cut, min(step, longest - start), op)


def _chunk(
    workspace: Workspace,
    parts: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
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
