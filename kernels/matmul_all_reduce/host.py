"""CPU ranks: partial results leave for the owner of their rows while the next ones are computed; sums come back.

Every rank owns a range of rows. Who writes: rank r computes its partial result for rank q = r+1, r+2, ..., and its copy
thread puts it into slot r of q's buffer, then sets flag 0 of rank r there; then the sum of its own rows into slot r of
every peer's results, then flag 1. Who waits: each rank, for all flags 0 after its own partial result, for all flags 1
at the end. Sums are taken in float32, in rank order: the same bits on every rank.
"""

from __future__ import annotations

import queue

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace
from ..device.comm.copy_thread import CopyThread

OP = "fused_matmul_all_reduce"


def host_matmul_all_reduce_layout(m: int, n: int, itemsize: int, world_size: int) -> Layout:
    """The workspace for a product [m, n]."""
    return Layout(world_size, 2, 2 * world_size * -(-m // world_size) * n * itemsize)


def host_matmul_all_reduce(
    workspace: Workspace, a: torch.Tensor, b: torch.Tensor, reduce_op: str
) -> torch.Tensor:
    """``sum over ranks of a @ b`` for a [m, K] and b [K, n]."""
    (m, _), n, dtype = a.shape, b.shape[1], a.dtype
    size, rank = workspace.world_size, workspace.rank
    part = -(-m // size)
    rows = [slice(min(q * part, m), min((q + 1) * part, m)) for q in range(size)]
    peers = [*range(rank + 1, size), *range(rank)]
    out = torch.empty(m, n, dtype=dtype)
    with workspace.lock, HostEpoch(workspace, OP) as epoch:
        buffers = [epoch.slots(peer, (2, size, part, n), dtype) for peer in range(size)]
        finished: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()

        def push() -> None:
            while (item := finished.get()) is not None:
                peer, partial = item
                epoch.wait_free(peer)
                buffers[peer][0, rank, : partial.shape[0]] = partial
                epoch.post(peer, 0)

        with CopyThread(workspace, push, lambda: finished.put(None)):
            for peer in peers:
                finished.put((peer, torch.mm(a[rows[peer]], b)))
            mine = a[rows[rank]]
            own = torch.mm(mine.float(), b.float()) if dtype != torch.float32 else torch.mm(mine, b)
        total: torch.Tensor | None = None
        for src in range(size):
            if src != rank:
                epoch.wait(src, 0)
            term = own if src == rank else buffers[rank][0, src, : own.shape[0]]
            # From 0.0 on, a sum of -0.0 would be 0.0.
            total = term.to(own.dtype, copy=True) if total is None else total.add_(term)
        assert total is not None
        if reduce_op == "avg":
            total /= size
        out[rows[rank]] = total.to(dtype)
        for peer in peers:
            buffers[peer][1, rank, : own.shape[0]] = out[rows[rank]]
            epoch.post(peer, 1)
        for peer in peers:
            epoch.wait(peer, 1)
            theirs = out[rows[peer]]
            theirs.copy_(buffers[rank][1, peer, : theirs.shape[0]])
    return out
