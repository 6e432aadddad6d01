"""CPU ranks: every rank writes each peer the rows that it needs, and no others (device/collective/host_exchange.py).

All ranks know every token's experts, so a receiver knows how many rows come and of which tokens: no counts travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.collective.combine import Combined
from ..device.collective.host_exchange import exchange_into, exchange_layout
from .reference import needs, sum_by_rank, take_tokens

OP, COMBINE = "moe_dispatch", "moe_combine"


def host_moe_layout(nbytes: int, world_size: int) -> Layout:
    """The workspace for tokens of ``nbytes`` on each rank."""
    return exchange_layout(nbytes, world_size)


def host_moe_dispatch(workspace: Workspace, x: Tensor, choices: Tensor, ranks: Tensor, k: int) -> Tensor:
    """[C, H], of x [T, H]; choices [C] and ranks [W * T] as ``rows_by_expert`` has them."""
    size, rank, hidden = workspace.world_size, workspace.rank, x.shape[1]
    wanted = _wanted(ranks, size)
    own = wanted[rank]
    parts = [x[own[:, q]].flatten() for q in range(size)]
    arrived = wanted[:, :, rank].flatten()
    sizes = [hidden * int(n) for n in wanted[:, :, rank].sum(1)]
    received = x.new_empty(sum(sizes))
    longest = hidden * int(wanted.sum(1).max())
    exchange_into(workspace, parts, received.split(sizes), OP, longest)
    # The choices of a row's token, among those of the tokens that have come.
    number = arrived.cumsum(0) - 1
    token = torch.div(choices, k, rounding_mode="floor").clamp(min=0)
    return take_tokens(received.view(-1, hidden), torch.where(choices >= 0, number[token], -1), 1)


def host_moe_combine(workspace: Workspace, combined: Combined, ranks: Tensor) -> Tensor:
    """[T, H], of each rank's y [C, H], and slots and weights [W * T, k]."""
    size, rank, hidden = workspace.world_size, workspace.rank, combined.y.shape[1]
    wanted, total = _wanted(ranks, size), combined.total()
    parts = [rows[wanted[q, :, rank]].flatten() for q, rows in enumerate(total.chunk(size))]
    own = wanted[rank].t()  # of each rank, the tokens that come back
    received = total.new_zeros(size, own.shape[1], hidden)
    back = [total.new_empty(hidden * int(n)) for n in own.sum(1)]
    longest = hidden * int(wanted.sum(1).max())
    exchange_into(workspace, parts, back, COMBINE, longest)
    for q, rows in enumerate(back):
        received[q][own[q]] = rows.view(-1, hidden)
    return sum_by_rank(received, ranks.view(size, -1)[rank])


def _wanted(ranks: Tensor, size: int) -> Tensor:
    """[W, T, W]: whether the token of a rank is wanted by another one."""
    return torch.stack([needs(ranks, q) for q in range(size)], 1).view(size, -1, size)
