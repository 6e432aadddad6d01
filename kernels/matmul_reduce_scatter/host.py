"""CPU ranks: partial results leave through a copy thread while the next ones are computed; the local one comes last.

Who writes: rank r computes its partial result for rank d = r+1, r+2, ... and its copy thread puts it into slot r of
d's buffer, then sets flag 0 of rank r there. Who waits: d, for all flags, after it has computed its own partial
result. The sum is taken in float32, in rank order, and bias and residual are added to it.
"""

from __future__ import annotations

import queue

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace
from ..device.comm.copy_thread import CopyThread

OP = "fused_matmul_reduce_scatter"


def host_scatter_layout(rows: int, n: int, itemsize: int, world_size: int) -> Layout:
    """The workspace; ``rows`` x ``n`` is the result's size."""
    return Layout(world_size, 1, world_size * rows * n * itemsize)


def host_matmul_reduce_scatter(
    workspace: Workspace,
    parts: list[tuple[torch.Tensor, torch.Tensor]],
    reduce_op: str,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over ranks of the partial results for this one.

    Args:
        parts: for each rank the factors of what it shall own: [rows, K] and [K, n].
        bias, residual: [n] and [rows, n], of this rank.

    Returns:
        [rows, n] of ``out_dtype``.
    """
    rows, n, dtype = parts[0][0].shape[0], parts[0][1].shape[1], parts[0][0].dtype
    size, rank = workspace.world_size, workspace.rank
    with workspace.lock, HostEpoch(workspace, OP) as epoch:
        slots = [epoch.slots(peer, (size, rows, n), dtype) for peer in range(size)]
        finished: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()

        def push() -> None:
            while (item := finished.get()) is not None:
                peer, partial = item
                epoch.wait_free(peer)
                slots[peer][rank] = partial
                epoch.post(peer, 0)

        with CopyThread(workspace, push, lambda: finished.put(None)):
            for step in range(1, size):
                peer = (rank + step) % size
                a, b = parts[peer]
                finished.put((peer, torch.mm(a, b)))
            a, b = parts[rank]
            own = torch.mm(a.float(), b.float()) if dtype != torch.float32 else torch.mm(a, b)
            total: torch.Tensor | None = None
            for src in range(size):
                if src != rank:
                    epoch.wait(src, 0)
                part = own if src == rank else slots[rank][src]
                # From 0.0 on, a sum of -0.0 would be 0.0.
                total = part.to(torch.float32, copy=True) if total is None else total.add_(part)
    assert total is not None
    if reduce_op == "avg":
        total /= size
    for term in (bias, residual):
        if term is not None:
            total += term
    return total.to(out_dtype)
