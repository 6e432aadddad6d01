"""What tests of experts' outputs that are put together share: fresh routes, and the sum in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Tokens, choices, hidden and experts.
SIZES = [(1, 1, 8, 4), (7, 2, 24, 3), (5, 8, 33, 16), (66, 4, 136, 8), (0, 2, 8, 4), (130, 3, 40, 2)]


class Routed(NamedTuple):
    """y [R, H] poisoned where no choice lies; slots and weights [T, k]; shared [T, H]."""

    y: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor

    def total(self, shared: bool) -> torch.Tensor:
        """This rank's rows in float64, one choice after the other."""
        rows = self.shared.detach().double() * shared
        for t in range(self.slots.shape[0]):
            for slot, weight in zip(self.slots[t].tolist(), self.weights[t], strict=True):
                if 0 <= slot < self.y.shape[0]:
                    rows[t] += weight.double() * self.y[slot].double()
        return rows

    def parts(self) -> list[torch.Tensor]:
        """What a float32 sum is rounded from: its norm may be far above that of the sum."""
        return [self.y.nan_to_num().double(), self.shared.double()]


def routed(sizes: tuple[int, int, int, int], dtype: torch.dtype, wide: bool, of: str = "random") -> Routed:
    """Of a rank that has every second expert; ``of``: "random", "one" expert for all, or "none" of this rank."""
    tokens, choices, hidden, experts = sizes
    ids = torch.rand(tokens, experts).argsort(-1)[:, :choices]
    if ids.shape[1] < choices:
        ids = torch.randint(experts, (tokens, choices))
    ids = torch.full_like(ids, {"random": 0, "one": 0, "none": 1}[of]) if of != "random" else ids
    here = ids % 2 == 0
    rows = tokens * choices
    order = torch.where(here, ids, experts).flatten().argsort(stable=True)
    slots = torch.empty(rows, dtype=torch.int32)
    slots[order] = torch.arange(rows, dtype=torch.int32)
    slots = torch.where(here, slots.view(tokens, choices), -1)
    y = torch.full((rows, hidden), float("nan"))
    used = slots[here].long()
    y[used] = torch.randn(len(used), hidden)
    weights = torch.rand(tokens, choices).to(torch.float32 if wide else dtype)
    weights[~here] = float("nan")  # adds nothing
    return Routed(y.to(dtype), slots, weights, torch.randn(tokens, hidden).to(dtype))
