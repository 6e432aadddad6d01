"""Which backend carries the heap of a device: the only place that chooses."""

from __future__ import annotations

import torch

from .base import Backend


def open_backend(device: torch.device) -> Backend:
    """The backend of ``device``.

    Raises:
        ValueError: weft has no heap for this kind of device.
    """
    if device.type == "cpu":
        from .host import HostBackend

        return HostBackend(device)
    if device.type == "cuda":
        from .vmm import VmmBackend

        return VmmBackend(device)
    raise ValueError(f"device: weft has heaps on cpu and cuda, not on {device.type!r}")
