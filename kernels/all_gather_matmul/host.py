"""CPU ranks: a copy thread pushes the local shard to the peers, chunk by chunk, while matmuls run.

Who writes: rank r's copy thread writes chunk c of its shard into slot r of every peer's buffer, then flag c of rank r.
Who waits: a peer waits for that flag before it multiplies the chunk. Peers are served in the order rank-1, rank-2, ...,
so each rank receives from rank+1 first, then rank+2, and multiplies in that order, its own shard before all.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import HostEpoch, Workspace
from ..device.comm.copy_thread import CHUNKS, Arriving, CopyThread

OP = "fused_all_gather_matmul"


def host_gather_layout(m: int, k: int, itemsize: int, world_size: int) -> Layout:
    """The workspace for shards [m, k]."""
    return Layout(world_size, CHUNKS, world_size * m * k * itemsize)


def host_all_gather_matmul(
    workspace: Workspace, a: torch.Tensor, bs: list[torch.Tensor], *, split_k: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered shards and their products.

    Args:
        a: the local shard, [m, K], contiguous.
        bs: each [K, N_i]; with ``split_k`` [world_size * K, N_i].
        split_k: shards lie side by side: ``A = cat(shards, 1)``, and the products add up over them.

    Returns:
        [world_size, m, K] and each [world_size * m, N_i] (``split_k``: [m, N_i]).
    """
    with workspace.lock, HostEpoch(workspace, OP) as epoch:
        arriving = Arriving(epoch, a)
        with CopyThread(workspace, arriving.push):
            outs = (_add_products if split_k else _products)(arriving, bs)
    return arriving.gathered, outs


def _products(arriving: Arriving, bs: list[torch.Tensor]) -> list[torch.Tensor]:
    gathered = arriving.gathered
    size, m, _ = gathered.shape
    outs = [gathered.new_empty(size, m, b.shape[1]) for b in bs]
    for step in range(size):
        src = (arriving.rank + step) % size
        for rows in arriving.each_chunk(src):
            for b, out in zip(bs, outs, strict=True):
                torch.mm(gathered[src, rows], b, out=out[src, rows])
    return [out.flatten(0, 1) for out in outs]


def _add_products(arriving: Arriving, bs: list[torch.Tensor]) -> list[torch.Tensor]:
    """In rank order, so that ranks with equal ``bs`` get equal bits, and in float32."""
    gathered = arriving.gathered
    size, _, k = gathered.shape
    sums: list[torch.Tensor] = []
    for src in range(size):
        arriving.wait_for(src)
        terms = [torch.mm(gathered[src].float(), b[src * k : (src + 1) * k].float()) for b in bs]
        # From 0.0 on, a sum of -0.0 would be 0.0.
        sums = [total + term for total, term in zip(sums, terms, strict=True)] if src else terms
    return [total.to(gathered.dtype) for total in sums]
