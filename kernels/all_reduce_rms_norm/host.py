"""CPU ranks: two_shot of kernel.cu with flags. Each rank owns some rows, adds them up and sends the totals.

Who writes: rank r, the rows of owner q into slot r of q's buffer, then flag 0 of rank r there; then the totals of its
own rows into slot r of every peer's results, then flag 1. Who waits: each rank, for every peer's flags. Owner q has the
rows q, q + W, q + 2 W, ...; more rows than a buffer takes go chunk by chunk. Each rank adds its own residual.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace
from .reference import NormKind

OP = "fused_all_reduce_rms_norm"
LAYER_NORM = "fused_all_reduce_layer_norm"
COMBINE = "fused_moe_combine_all_reduce_rms_norm"
QUANT = "fused_all_reduce_rms_norm_quant"
CHUNK_BYTES = 4 << 20  #: bytes of x that are sent in one epoch of a buffer


def op_of(kind: NormKind) -> str:
    """The public op that computes it."""
    if kind.quant is not None:
        return QUANT
    if kind.combine is not None:
        return COMBINE
    return LAYER_NORM if kind.subtract_mean else OP


def _rows(rows: int, row_bytes: int, world_size: int) -> tuple[int, int]:
    """Rows of x in one epoch of a buffer, and of one owner at most."""
    most = max(1, min(rows, CHUNK_BYTES // max(row_bytes, 1)))
    return most, -(-most // world_size)


def host_norm_layout(rows: int, row_bytes: int, world_size: int) -> Layout:
    """The workspace for so many rows."""
    return Layout(world_size, 2, 2 * world_size * _rows(rows, row_bytes, world_size)[1] * row_bytes)


def host_all_reduce_of_rows(workspace: Workspace, x: torch.Tensor, op: str) -> torch.Tensor:
    """What all ranks' x, [rows, hidden] and contiguous, add up to, for the op of this name."""
    rows, hidden = x.shape
    total = torch.empty_like(x)
    step, _ = _rows(rows, hidden * x.element_size(), workspace.world_size)
    with workspace.lock:
        for start in range(0, rows, step):
            chunk = slice(start, start + step)
            _chunk(workspace, op, x[chunk], total[chunk])
    return total


def _chunk(workspace: Workspace, op: str, x: torch.Tensor, total: torch.Tensor) -> None:
    size, rank = workspace.world_size, workspace.rank
    peers = [*range(rank + 1, size), *range(rank)]
    with HostEpoch(workspace, op) as epoch:
        most, hidden = -(-x.shape[0] // size), x.shape[1]
        # What came in, and the results: [2, W, rows, hidden].
        slots = [epoch.slots(owner, (2, size, most, hidden), x.dtype) for owner in range(size)]
        for peer in peers:
            epoch.wait_free(peer)
            theirs = x[peer::size]
            slots[peer][0, rank, : theirs.shape[0]] = theirs
            epoch.post(peer, 0)
        mine = slots[rank]
        own = x[rank::size]
        for peer in peers:
            epoch.wait(peer, 0)
        wide: torch.Tensor | None = None
        for src in range(size):
            part = own if src == rank else mine[0, src, : own.shape[0]]
            # From 0.0 on, a sum of -0.0 would be 0.0.
            wide = part.to(torch.float32, copy=True) if wide is None else wide.add_(part)
        assert wide is not None
        total[rank::size] = wide.to(x.dtype)
        for peer in peers:
            slots[peer][1, rank, : own.shape[0]] = total[rank::size]
            epoch.post(peer, 1)
        for peer in peers:
            epoch.wait(peer, 1)
            theirs = total[peer::size]
            theirs.copy_(mine[1, peer, : theirs.shape[0]])
