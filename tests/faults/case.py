"""A call of the tables of faults, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """-1, 0 and 1, the same for the same seed on every rank; bfloat16 on CUDA, whose kernels are made for it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randint(-1, 2, shape, generator=generator, device="cpu")
    device = torch.get_default_device()
    return x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


@dataclass
class Case:
    """A call of an op at one step: ``call()`` is this rank's, ``want()`` its exact result, ``other()`` a call with
    another argument."""

    call: Callable[[], torch.Tensor]
    want: Callable[[], torch.Tensor]
    other: Callable[[], torch.Tensor]
