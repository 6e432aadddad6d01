"""Rows that are sent in splits of sizes that the device alone knows: where each of them lies, in plain torch.

W ranks have e splits for each of them. They are written by rank, [W, e], or by split, [e, W], and arrive written the
other way: from each rank to each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Splits(NamedTuple):
    """All ranks' splits of T rows.

    Attributes:
        sizes: [W, W * e], int64, the rows of each of a rank's splits.
        starts: likewise, its first row; None: one begins where the one before ends.
        by_rank: whether they are written by rank.
        align: what the first row of each e, or of each rank, is a multiple of where they arrive; there is room for at
            least so many. 0: they lie one after the other.
    """

    sizes: Tensor
    starts: Tensor | None
    by_rank: bool
    align: int


class SplitRows(NamedTuple):
    """Where the rows of all ranks go.

    Attributes:
        sizes: [W * e], int64, of the splits of this rank as they arrive.
        starts: likewise, the row at which each begins.
        slots: [W * T, 1], int32: where each row lies on this rank; -1: it does not.
        choices: [C], int32: the row that lies there, of the W * T; -1: none.
        ranks: [W * T], int32: bit r says that rank r gets the row.
        needed: [W]: rows of each rank, from its first to its last one.
        wrong: [W]: whether a rank's splits are negative, overlap, or are not within its rows.
    """

    sizes: Tensor
    starts: Tensor
    slots: Tensor
    choices: Tensor
    ranks: Tensor
    needed: Tensor
    wrong: Tensor


def rows_of_splits(splits: Splits, rank: int, tokens: int, capacity: int) -> SplitRows:
    """``tokens``: T; ``capacity``: C."""
    sizes, size = splits.sizes, splits.sizes.shape[0]
    each = sizes.shape[1] // size
    starts = sizes.cumsum(1) - sizes if splits.starts is None else splits.starts
    numbers = torch.arange(sizes.shape[1], device=sizes.device)
    to = numbers // each if splits.by_rank else numbers % size

    # As they arrive, [W, e, W] or [W, W, e], of each rank.
    if splits.by_rank:
        arriving = sizes.view(size, size, each).permute(1, 2, 0)
    else:
        arriving = sizes.view(size, each, size).permute(2, 0, 1)
    room = arriving.sum(2)
    if splits.align:
        room = ((room + splits.align - 1) // splits.align * splits.align).clamp(min=splits.align)
    places = (room.cumsum(1) - room)[..., None] + arriving.cumsum(2) - arriving
    needed = ((places + arriving) * (arriving > 0)).flatten(1).amax(1)
    lies = places.permute(*((2, 0, 1) if splits.by_rank else (1, 2, 0))).reshape(sizes.shape)

    # A row's split is the last one that begins before it, of those that have rows.
    begins, order = torch.where(sizes > 0, starts, tokens).sort(1)
    ends = begins + sizes.gather(1, order).clamp(min=0)
    after = torch.cat([begins[:, 1:], torch.full_like(begins[:, :1], tokens)], 1)
    wrong = ((ends > after) | (begins < 0)).any(1) | (sizes < 0).any(1)
    rows = torch.arange(tokens, device=sizes.device).expand(size, -1).contiguous()
    at = torch.searchsorted(begins, rows, right=True) - 1
    split = order.gather(1, at.clamp(min=0))
    inside = (at >= 0) & (rows < ends.gather(1, at.clamp(min=0)))
    of_rank, bits = to[split], torch.where(inside, 1 << to[split], 0)
    slots = lies.gather(1, split) + rows - starts.gather(1, split)
    slots = torch.where(inside & (of_rank == rank) & (slots < capacity), slots, -1).flatten()
    choices = slots.new_full((capacity + 1,), -1)
    choices.scatter_(
        0, torch.where(slots >= 0, slots, capacity), torch.arange(slots.numel(), device=sizes.device)
    )
    # What has no place would come to lie behind the last one.
    mine = arriving[rank].flatten(), places[rank].flatten()
    return SplitRows(*mine, slots.int()[:, None], choices[:-1].int(), bits.flatten().int(), needed, wrong)
