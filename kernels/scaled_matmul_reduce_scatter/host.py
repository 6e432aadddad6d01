"""CPU ranks: partial results leave through a copy thread while the next ones are computed; the local one comes last.

Who writes: rank r computes its partial result for rank d = r+1, r+2, ... and its copy thread puts it, rounded to the
result's dtype, into slot r of d's buffer, then sets flag 0 of rank r there. Who waits: d, for all flags, after it has
computed its own partial result. The sum is taken in float32, in rank order.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace
from ..device.comm.copy_thread import CopyThread

OP = "fused_scaled_matmul_reduce_scatter"


def host_scaled_scatter_layout(numel: int, itemsize: int, world_size: int) -> Layout:
    """The workspace; a result has ``numel`` numbers."""
    return Layout(world_size, 1, world_size * numel * itemsize)


def host_scaled_matmul_reduce_scatter(
    workspace: Workspace,
    products: Sequence[Callable[[], torch.Tensor]],
    reduce_op: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The sum over ranks of the partial results for this one.

    Args:
        products: computes for each rank the partial result that it shall own, in float32, all of one shape.

    Returns:
        of that shape and ``out_dtype``.
    """
    size, rank = workspace.world_size, workspace.rank
    with workspace.lock, HostEpoch(workspace, OP) as epoch:
        finished: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()

        def slots(at: int, like: torch.Tensor) -> torch.Tensor:
            return epoch.slots(at, (size, *like.shape), out_dtype)

        def push() -> None:
            while (item := finished.get()) is not None:
                peer, partial = item
                epoch.wait_free(peer)
                slots(peer, partial)[rank] = partial
                epoch.post(peer, 0)

        with CopyThread(workspace, push, lambda: finished.put(None)):
            for step in range(1, size):
                peer = (rank + step) % size
                finished.put((peer, products[peer]()))
            own = products[rank]()
            total: torch.Tensor | None = None
            for src in range(size):
                if src != rank:
                    epoch.wait(src, 0)
                part = own if src == rank else slots(rank, own)[src]
                # From 0.0 on, a sum of -0.0 would be 0.0.
                total = part.to(torch.float32, copy=True) if total is None else total.add_(part)
    assert total is not None
    if reduce_op == "avg":
        total /= size
    return total.to(out_dtype)
