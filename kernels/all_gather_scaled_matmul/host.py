"""CPU ranks: a copy thread pushes the local shard and its scales to the peers, chunk by chunk, while matmuls run.

A row is sent as bytes, its numbers and after them its scales: one flag is for both. Who writes: rank r's copy thread
writes chunk c of its rows into slot r of every peer's buffer, then flag c of rank r. Who waits: a peer waits for that
flag before it multiplies the chunk. Peers are served in the order rank-1, rank-2, ..., so each rank receives from
rank+1 first, then rank+2, and multiplies in that order, its own shard before all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace
from ..device.comm.copy_thread import CopyThread

OP = "fused_all_gather_scaled_matmul"
CHUNKS = 2  #: of a shard, sent one by one

Consume: TypeAlias = Callable[[int, slice, torch.Tensor, torch.Tensor | None], None]


def host_scaled_gather_layout(m: int, row_bytes: int, world_size: int) -> Layout:
    """The workspace for shards of ``m`` rows, each with its scales."""
    return Layout(world_size, CHUNKS, world_size * m * row_bytes)


def row_bytes(a: torch.Tensor, scales: torch.Tensor | None) -> int:
    """Of what ``as_rows`` returns."""
    return a.shape[1] + (0 if scales is None else 4 * scales.shape[1])


def as_rows(a: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows of fp8 [m, K] and of their scales [m, S], if they travel too, as bytes [m, K + 4 S]."""
    k, count = a.shape[1], 0 if scales is None else scales.shape[1]
    rows = torch.empty(a.shape[0], row_bytes(a, scales), dtype=torch.uint8)
    rows[:, :k].view(a.dtype).copy_(a)
    if scales is not None:
        # Of a dimension of size 1 the stride may be any, with which no bytes can be viewed.
        flat = scales.contiguous().as_strided((scales.numel(),), (1,))
        rows[:, k:].copy_(flat.view(torch.uint8).view(a.shape[0], 4 * count))
    return rows


def exchange_rows(
    workspace: Workspace, mine: torch.Tensor, k: int, dtype: torch.dtype, consume: Consume
) -> None:
    """Hand every rank's rows to ``consume``, which multiplies them, as they arrive.

    Args:
        mine: the local rows, of ``as_rows``; ``k`` numbers of ``dtype`` each.
        consume: gets the rank, which of its rows, their numbers, which are valid during the call, and their scales:
            the own shard as a whole, then the peers' chunks in the order in which they arrive.
    """
    (m, row), size, rank = mine.shape, workspace.world_size, workspace.rank
    with workspace.lock, HostEpoch(workspace, OP) as epoch:
        slots = [epoch.slots(peer, (size, m, row), torch.uint8) for peer in range(size)]
        chunks = [slice(c * m // CHUNKS, (c + 1) * m // CHUNKS) for c in range(CHUNKS)]

        def push() -> None:
            for step in range(1, size):
                peer = (rank - step) % size
                epoch.wait_free(peer)
                for c, rows in enumerate(chunks):
                    slots[peer][rank, rows] = mine[rows]
                    epoch.post(peer, c)

        def take(src: int, rows: slice, arrived: torch.Tensor) -> None:
            scales: torch.Tensor | None = None
            if row > k:  # in memory of their own: they are wanted after the epoch, too
                scales = torch.empty(arrived.shape[0], (row - k) // 4)
                scales.view(torch.uint8).copy_(arrived[:, k:])
            consume(src, rows, arrived[:, :k].contiguous().view(dtype), scales)

        with CopyThread(workspace, push):
            take(rank, slice(0, m), mine)
            for step in range(1, size):
                src = (rank + step) % size
                for c, rows in enumerate(chunks):
                    epoch.wait(src, c)
                    take(src, rows, slots[rank][src, rows])
