"""CPU ranks, of all ranks' tokens: they arrive as for ``all_gather_matmul``, and are multiplied when they are there.

Who writes and who waits is as there: the copy thread, chunk by chunk, and whoever multiplies. Rows that name a rank's
tokens wait for its chunks alone, own tokens before all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...symm_mem.workspace import HostEpoch, Workspace
from ..device.comm.copy_thread import Arriving, CopyThread
from .reference import experts_of_rows, reference_grouped_matmul

OP = "fused_all_gather_grouped_matmul"


def host_all_gather_grouped_matmul(
    workspace: Workspace, a: Tensor, terms: Sequence[tuple[Tensor, Tensor | None]], rows: Tensor, offs: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gathered tokens [W * m, K], and the products [R, N_i] of those that ``rows`` names.

    Args:
        a: this rank's tokens [m, K], contiguous.
        terms: each B [E, K, N_i], and its bias [E, N_i] or None; offs: [E].
    """
    m, size, rank = a.shape[0], workspace.world_size, workspace.rank
    tokens = rows.long().clamp(0, size * m - 1)
    experts = experts_of_rows(offs, rows.shape[0])
    outs = [a.new_empty(rows.shape[0], b.shape[2]) for b, _ in terms]
    with workspace.lock, HostEpoch(workspace, OP) as epoch:
        arriving = Arriving(epoch, a)
        every = arriving.gathered.flatten(0, 1)
        with CopyThread(workspace, arriving.push):
            for step in range(size):
                src = (rank + step) % size
                arriving.wait_for(src)
                (here,) = torch.where((tokens // m == src) & (experts < offs.shape[0]))
                counts = torch.searchsorted(experts[here], torch.arange(offs.shape[0]), right=True).int()
                for (b, bias), out in zip(terms, outs, strict=True):
                    out[here] = reference_grouped_matmul(every, b, counts, tokens[here], bias)
    return every, outs
