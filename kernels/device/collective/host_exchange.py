"""CPU ranks: every rank writes each peer's part into the peer's buffer, sets a flag, and takes what arrives.

Who writes: rank r, its part for rank q into slot r of q's buffer, then flag 0 of rank r there. Who waits: each rank,
for every peer's flag. Parts larger than a buffer are sent chunk by chunk. All ops run so between CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....symm_mem.layout import Layout
from ....symm_mem.workspace import HostEpoch, Workspace

CHUNK_BYTES = 4 << 20  #: of a part that are sent in one epoch of a buffer


def exchange_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for parts of ``nbytes``."""
    return Layout(world_size, 1, world_size * min(nbytes, CHUNK_BYTES))


def _exchange(
    workspace: Workspace,
    parts: Sequence[torch.Tensor],
    longest: int,
    op: str,
    take: Callable[[slice, list[torch.Tensor]], None],
) -> None:
    """Send each rank its part [n], and take what every rank has for this one.

    Args:
        longest: numbers of the longest part of all ranks.
        op: whose call it is.
        take: gets, chunk by chunk, where in a part it lies, and the ranks' chunks, as long as that of the longest part,
            or the own part. They are valid during the call.
    """
    size, rank, dtype = workspace.world_size, workspace.rank, parts[0].dtype
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    peers = [*range(rank + 1, size), *range(rank)]
    with workspace.lock:
        for start in range(0, longest, step):
            chunk, shape = slice(start, start + step), (size, min(step, longest - start))
            with HostEpoch(workspace, op) as epoch:
                for peer in peers:
                    part = parts[peer][chunk]
                    epoch.wait_free(peer)
                    epoch.slots(peer, shape, dtype)[rank, : part.shape[0]] = part
                    epoch.post(peer, 0)
                arrived = [*epoch.slots(rank, shape, dtype).unbind()]
                arrived[rank] = parts[rank][chunk]
                for peer in peers:
                    epoch.wait(peer, 0)
                take(chunk, arrived)


def exchange_into(
    workspace: Workspace,
    parts: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    op: str,
    longest: int | None = None,
) -> None:
    """``received`` from each rank, [n_i], becomes what that has for this one.

    Args:
        longest: numbers of the longest part of all ranks, where ``received`` does not say it.
    """

    def take(chunk: slice, arrived: list[torch.Tensor]) -> None:
        for src, part in enumerate(arrived):
            into = received[src][chunk]
            into.copy_(part[: into.shape[0]])

    if longest is None:
        longest = max(received, key=torch.numel).numel()
    _exchange(workspace, parts, longest, op, take)


def gather(
    workspace: Workspace, x: torch.Tensor, op: str, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """All ranks' x, [n], one after the other. ``sizes``: theirs, where they differ."""
    workspace.begins(op)
    size = workspace.world_size
    sizes = [x.shape[0]] * size if sizes is None else [*sizes]
    out = x.new_empty(sum(sizes))
    exchange_into(workspace, [x] * size, out.split(sizes), op)
    return out


def gather_to(
    workspace: Workspace, x: torch.Tensor, sizes: Sequence[int], root: int, op: str
) -> torch.Tensor:
    """The same on rank ``root``, none on the others. ``sizes``: of all ranks' x."""
    workspace.begins(op)
    size = workspace.world_size
    received = [*sizes] if workspace.rank == root else [0] * size
    out, none = x.new_empty(sum(received)), x.new_empty(0)
    sent = [x if rank == root else none for rank in range(size)]
    exchange_into(workspace, sent, out.split(received), op, max(sizes))
    return out


def exchange_parts(workspace: Workspace, parts: torch.Tensor, op: str) -> torch.Tensor:
    """What every rank has for this one, [W, n]; parts: [W, n], the q-th for rank q."""
    received = torch.empty_like(parts)
    exchange_into(workspace, parts.unbind(), received.unbind(), op)
    return received


def reduce_parts(
    workspace: Workspace, parts: Sequence[torch.Tensor], out: torch.Tensor, reduce_op: str, op: str
) -> None:
    """``out`` = what all ranks' parts for this one make together, as ``reduced``."""

    def take(chunk: slice, arrived: list[torch.Tensor]) -> None:
        into = out[chunk]
        into.copy_(reduced([part[: into.shape[0]] for part in arrived], reduce_op))

    _exchange(workspace, parts, max(parts, key=torch.numel).numel(), op, take)


def reduced(parts: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """What all ranks' parts make together, in float32 and in rank order."""
    combine = {"max": torch.maximum, "min": torch.minimum}.get(reduce_op, torch.add)
    # From 0.0 on, a sum of -0.0 would be 0.0.
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        combine(total, part.to(torch.float32), out=total)
    return total / len(parts) if reduce_op == "avg" else total


def reduce_scatter_parts(
    workspace: Workspace, parts: Sequence[torch.Tensor], reduce_op: str, op: str
) -> torch.Tensor:
    """The same in new memory; ``parts`` [n_q] for each rank q."""
    out = torch.empty_like(parts[workspace.rank])
    reduce_parts(workspace, parts, out, reduce_op, op)
    return out
