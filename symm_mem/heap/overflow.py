"""Rows that did not fit, which on CUDA the device alone knows: noted in pinned memory, raised when the host looks."""

from __future__ import annotations

import torch
from torch import Tensor

_notes: dict[
    torch.device, Tensor
] = {}  # the rows that a call needed, and those that it had; zeros: none lacked any


def refuse_overflow(needed: Tensor, capacity: int) -> None:
    """Every rank's rows must be ``capacity`` at most: on the CPU now, on CUDA at the next look.

    Raises:
        ValueError: naming both counts, of this call or of an earlier one.
    """
    most = needed.max()
    if not needed.is_cuda:
        _refuse(int(most), capacity)
        return
    raise_noted()
    if (kept := _notes.get(needed.device)) is None:
        from ..backends.vmm import relaxed_capture

        with relaxed_capture(), torch.inference_mode(False):
            kept = _notes[needed.device] = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
    _note(kept, most, capacity)


def _note(kept: Tensor, most: Tensor, capacity: int) -> None:
    """The first overflow stays, whatever later calls need; in stream order, so that a graph repeats it."""
    before = kept.to(most.device, non_blocking=True)
    now = torch.stack([most, torch.full_like(most, capacity)])
    kept.copy_(torch.where((before[0] == 0) & (most > capacity), now, before), non_blocking=True)


def raise_noted() -> None:
    """Raise the first overflow of each device that the host has not seen, once."""
    for kept in _notes.values():
        most, capacity = kept.tolist()
        if most:
            kept.zero_()
            _refuse(most, capacity)


def _refuse(most: int, capacity: int) -> None:
    if most > capacity:
        raise ValueError(
            f"capacity: is {capacity}, must be at least {most}, the rows of the rank that has most"
        )
