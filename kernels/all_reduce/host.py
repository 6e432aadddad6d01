"""CPU ranks: every rank writes its input into every peer's buffer, sets a flag, and reduces what arrives, in rank
order.

Who writes: rank r, its elements into slot r of every peer's buffer, then flag 0 of rank r there. Who waits: each rank,
for every peer's flag. Inputs larger than a buffer are sent chunk by chunk.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace

OP = "one_shot_all_reduce"
IN_PLACE = f"{OP}_"
CHUNK_BYTES = 4 << 20  #: bytes of the input that are sent in one epoch of a buffer


def host_all_reduce_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for inputs of ``nbytes``."""
    return Layout(world_size, 1, world_size * min(nbytes, CHUNK_BYTES))


def host_all_reduce(
    workspace: Workspace, x: torch.Tensor, out: torch.Tensor, reduce_op: str, op: str = OP
) -> None:
    """``out`` = what all ranks' x make together; both 1-D and contiguous, of equal length. ``op``: whose call it is."""
    step = max(1, CHUNK_BYTES // x.element_size())
    with workspace.lock:
        for start in range(0, x.numel(), step):
            _chunk(workspace, x[start : start + step], out[start : start + step], reduce_op, op)


def _chunk(workspace: Workspace, x: torch.Tensor, out: torch.Tensor, reduce_op: str, op: str) -> None:
    size, rank = workspace.world_size, workspace.rank
    with HostEpoch(workspace, op) as epoch:
        for step in range(1, size):
            peer = (rank + step) % size
            epoch.wait_free(peer)
            epoch.slots(peer, (size, x.numel()), x.dtype)[rank] = x
            epoch.post(peer, 0)
        slots = epoch.slots(rank, (size, x.numel()), x.dtype)
        for peer in range(size):
            if peer != rank:
                epoch.wait(peer, 0)
        slots[rank] = x
        total = slots[0].to(torch.float32, copy=True)
        combine = {"max": torch.maximum, "min": torch.minimum}.get(reduce_op, torch.add)
        for src in range(1, size):
            combine(total, slots[src].to(torch.float32), out=total)
    out.copy_(total / size if reduce_op == "avg" else total)
