"""CPU ranks, of all ranks' tokens: they are gathered, and then multiplied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import gather
from .reference import reference_grouped_matmul

OP = "fused_all_gather_grouped_matmul"


def host_all_gather_grouped_matmul(
    workspace: Workspace, a: Tensor, terms: Sequence[tuple[Tensor, Tensor | None]], rows: Tensor, offs: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gathered tokens [W * m, K], and the products [R, N_i] of those that ``rows`` names.

    Args:
        a: this rank's tokens [m, K], contiguous.
        terms: each B [E, K, N_i], and its bias [E, N_i] or None; offs: [E].
    """
    every = gather(workspace, a.view(-1), OP).view(-1, a.shape[1])
    return every, [reference_grouped_matmul(every, B, offs, rows, bias) for B, bias in terms]
