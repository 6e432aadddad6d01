"""CPU ranks: every rank writes part q of its input into rank q's buffer, sets a flag, and reduces what arrives, in rank
order.

Who writes: rank r, its part for rank q into slot r of q's buffer, then flag 0 of rank r there. Who waits: each rank,
for every peer's flag. Parts larger than a buffer are sent chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace

OP = "one_shot_reduce_scatter"
INTO = f"{OP}_out"
CHUNK_BYTES = 4 << 20  #: of a part that are sent in one epoch of a buffer


def host_reduce_scatter_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for parts of ``nbytes``."""
    return Layout(world_size, 1, world_size * min(nbytes, CHUNK_BYTES))


def host_reduce_scatter(
    workspace: Workspace, parts: torch.Tensor | Sequence[torch.Tensor], reduce_op: str, op: str = OP
) -> torch.Tensor:
    """This rank's part of what all ranks' ``parts`` make together. ``op``: whose call it is.

    parts: [W, n], or one [n] for each rank, of lengths that are the same on every rank. All ranks make as many epochs
    as the longest takes.
    """
    own = parts[workspace.rank]
    out = own.new_empty(own.shape)
    longest = max([parts[q].shape[0] for q in range(workspace.world_size)])
    step = max(1, CHUNK_BYTES // out.element_size())
    with workspace.lock:
        for start in range(0, longest, step):
            chunk = slice(start, start + step)
            cut = [parts[q][chunk] for q in range(workspace.world_size)]
            _chunk(workspace, cut, out[chunk], reduce_op, op)
    return out


def _chunk(
    workspace: Workspace, parts: Sequence[torch.Tensor], out: torch.Tensor, reduce_op: str, op: str
) -> None:
    """Some parts may be shorter: a slot holds the longest."""
    size, rank = workspace.world_size, workspace.rank
    shape = size, max([part.shape[0] for part in parts])
    with HostEpoch(workspace, op) as epoch:
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait_free(peer)
            epoch.slots(peer, shape, out.dtype)[rank, : parts[peer].shape[0]] = parts[peer]
            epoch.post(peer, 0)
        slots = epoch.slots(rank, shape, out.dtype)[:, : out.shape[0]]
        for peer in range(size):
            if peer != rank:
                epoch.wait(peer, 0)
        slots[rank] = parts[rank]
        total = slots[0].to(torch.float32, copy=True)
        combine = {"max": torch.maximum, "min": torch.minimum}.get(reduce_op, torch.add)
        for src in range(1, size):
            combine(total, slots[src].to(torch.float32), out=total)
    out.copy_(total / size if reduce_op == "avg" else total)
