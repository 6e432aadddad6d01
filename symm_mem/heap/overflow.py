"""Rows that did not fit, which on CUDA the device alone knows: noted in pinned memory, raised when the host looks."""

from __future__ import annotations

import torch
from torch import Tensor


class _Note:
    """Of a group's calls on a device.

    Args:
        kept: [3], zeros: how many calls lacked room; the rows that the last of them needed, and had.
        argument: which says how many they have.
    """

    def __init__(self, kept: Tensor, argument: str) -> None:
        self.kept, self.argument = kept, argument
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
            _refuse(most, capacity, self.argument)


_CAPACITY = "capacity"
_notes: dict[tuple[torch.device, str, str], _Note] = {}


def overflow_note(device: torch.device, group_name: str, argument: str = _CAPACITY) -> Tensor:
    """What a group's calls on a GPU write such rows to: ``kept`` of its ``_Note``."""
    key = device, group_name, argument
    if key not in _notes:
        from ..backends.vmm import relaxed_capture

        with relaxed_capture(), torch.inference_mode(False):
            _notes[key] = _Note(torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=True), argument)
    return _notes[key].kept


def refuse_overflow(needed: Tensor, capacity: int, group_name: str, argument: str = _CAPACITY) -> None:
    """Every rank's rows must be ``capacity`` at most: on the CPU now, on CUDA at the next look.

    Args:
        argument: that says how many.

    Raises:
        ValueError: naming both counts.
    """
    most = needed.max()
    if needed.is_cuda:
        overflow_note(needed.device, group_name, argument)
        _notes[needed.device, group_name, argument].add(most, capacity)
    else:
        _refuse(int(most), capacity, argument)


def raise_noted(group_name: str | None = None) -> None:
    """Raise what the host has not seen yet, of all groups' calls or of one's, once."""
    for (_, name, _), note in list(_notes.items()):
        if group_name in (None, name):
            note.raise_new()


def _refuse(most: int, capacity: int, argument: str) -> None:
    if most > capacity:
        room = "; without one there is room for each expert once a token" if argument == _CAPACITY else ""
        raise ValueError(
            f"{argument}: is {capacity}, must be at least {most}, the rows of the rank that has most{room}"
        )
