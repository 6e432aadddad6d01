"""What moe_dispatch and moe_combine compute before and after their exchanges, in plain torch; and between CPU ranks.

Shapes: T tokens of each of W ranks, k choices of each, C rows of this rank, H hidden. Nothing here waits for a GPU.
Between CPU ranks every rank writes each peer the rows that it needs, and no others (collective/host_exchange.py): all
ranks know every token's experts, so a receiver knows how many rows come and of which tokens.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...symm_mem.workspace import Workspace
from ..device.collective.combine import Combined
from ..device.collective.host_exchange import exchange_into
from . import BACK, OP


class ExpertRanks(NamedTuple):
    """Who has which experts: each rank as many, in rank order. ``align``: what each expert's rows are a multiple of."""

    num_experts: int
    world_size: int
    rank: int
    align: int

    @property
    def each(self) -> int:
        return self.num_experts // self.world_size

    @property
    def first(self) -> int:
        """This rank's first one."""
        return self.rank * self.each


def rows_by_expert(
    ids: Tensor, routed: tuple[Tensor, Tensor], of: ExpertRanks, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where the choices of all ranks' tokens go.

    Args:
        ids: [W * T, k]; what names no expert goes nowhere.
        routed: offs and slots of this rank's experts, as ``moe_route`` finds them.
        capacity: C.

    Returns:
        - offs [experts of this rank], int32: rows up to the end of each expert, padded ones among them.
        - slots [W * T, k], int32: the row of each choice on this rank; -1: none.
        - choices [C], int32: the choice of each row, of the W * T * k; -1: none.
        - ranks [W * T], int32: bit r says that rank r has an expert of the token.
        - needed [W]: rows of each rank. Past ``capacity`` there are no rows.
    """
    (ends, slots), experts, every = routed, of.num_experts, ids.long()
    known = (every >= 0) & (every < experts)
    at = torch.where(known, every, experts)
    counts = at.new_zeros(experts + 1).scatter_add_(0, at.flatten(), torch.ones_like(at).flatten())
    padded = (counts[:-1] + of.align - 1) // of.align * of.align
    mine = slice(of.first, of.first + of.each)
    offs = padded[mine].cumsum(0)
    moved = (offs - padded[mine]) - (ends - counts[mine])  # by what comes before, padded
    lies = slots + moved[(at - of.first).clamp(0, of.each - 1)]
    slots = torch.where((slots >= 0) & (lies < capacity), lies, -1)
    choices = slots.new_full((capacity + 1,), -1)
    numbers = torch.arange(slots.numel(), device=ids.device)
    choices.scatter_(0, torch.where(slots >= 0, slots, capacity).flatten(), numbers)
    bits = torch.where(known, 1 << torch.div(at, of.each, rounding_mode="floor"), 0)
    ranks = reduce(torch.bitwise_or, bits.unbind(1))
    needed = padded.view(of.world_size, of.each).sum(1)
    return offs.clamp(max=capacity).int(), slots.int(), choices[:-1].int(), ranks.int(), needed


def needs(ranks: Tensor, rank: int) -> Tensor:
    """Whether a rank has an expert of each token."""
    return (ranks >> rank & 1).bool()


def take_tokens(tokens: Tensor, choices: Tensor, k: int) -> Tensor:
    """[C, H]: the token of each choice, zeros where there is none."""
    if tokens.shape[0] == 0:
        return tokens.new_zeros(choices.shape[0], tokens.shape[1])
    taken = tokens[torch.div(choices, k, rounding_mode="floor").clamp(min=0)]
    return taken.masked_fill_((choices < 0)[:, None], 0)


def sum_by_rank(parts: Tensor, ranks: Tensor) -> Tensor:
    """[T, H] of parts [W, T, H]: those of ranks that have an expert of a token, in rank order in float32, rounded
    once."""
    total = torch.zeros(parts.shape[1:], dtype=torch.float32, device=parts.device)
    for rank, part in enumerate(parts.unbind()):
        total += torch.where(needs(ranks, rank)[:, None], part, 0)
    return total.to(parts.dtype)


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
    exchange_into(workspace, parts, back, BACK, longest)
    for q, rows in enumerate(back):
        received[q][own[q]] = rows.view(-1, hidden)
    return sum_by_rank(received, ranks.view(size, -1)[rank])


def _wanted(ranks: Tensor, size: int) -> Tensor:
    """[W, T, W]: whether the token of a rank is wanted by another one."""
    return torch.stack([needs(ranks, q) for q in range(size)], 1).view(size, -1, size)
