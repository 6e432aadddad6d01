"""Rows that did not fit, which on CUDA the device alone knows: noted in pinned memory, raised when the host looks."""

from __future__ import annotations

import torch
from torch import Tensor


class _Note:
    """Of a group's calls on a device.

    Args:
        kept: [3], zeros: how many calls lacked room; the rows that the last of them needed, and had.
    """

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept
        self.seen = 0  # of these calls. The host writes nothing that the device may still be about to write.

    def add(self, most: Tensor, capacity: int) -> None:
        """In stream order, so that a graph repeats it."""
        before = self.kept.to(most.device, non_blocking=True)
        now = torch.stack([before[0] + 1, most, torch.full_like(most, capacity)])
        self.kept.copy_(torch.where(most > capacity, now, before), non_blocking=True)

    def raise_new(self) -> None:
        count, most, capacity = self.kept.tolist()
        if count != self.seen:
            self.seen = count
            _refuse(most, capacity)


_notes: dict[tuple[torch.device, str], _Note] = {}


def overflow_note(device: torch.device, group_name: str) -> Tensor:
    """What a group's calls on a GPU write such rows to: ``kept`` of its ``_Note``."""
    key = device, group_name
    if key not in _notes:
        from ..backends.vmm import relaxed_capture

        with relaxed_capture(), torch.inference_mode(False):
            _notes[key] = _Note(torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=True))
    return _notes[key].kept


def refuse_overflow(needed: Tensor, capacity: int, group_name: str) -> None:
    """Every rank's rows must be ``capacity`` at most: on the CPU now, on CUDA at the next look.

    Raises:
        ValueError: naming both counts.
    """
    most = needed.max()
    if needed.is_cuda:
        overflow_note(needed.device, group_name)
        _notes[needed.device, group_name].add(most, capacity)
    else:
        _refuse(int(most), capacity)


def raise_noted(group_name: str | None = None) -> None:
    """Raise what the host has not seen yet, of all groups' calls or of one's, once."""
    for (_, name), note in list(_notes.items()):
        if group_name in (None, name):
            note.raise_new()


def _refuse(most: int, capacity: int) -> None:
    if most > capacity:
        raise ValueError(
            f"capacity: is {capacity}, must be at least {most}, the rows of the rank that has most"
        )
