"""What the models of kernels know of a GPU besides its multiprocessors: its memory, in which Hopper's GPUs differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from cuda.bindings import driver

from ...symm_mem.backends.vmm import check, memory_of


@dataclass(frozen=True)
class Chip:
    """``memory``: bytes a microsecond, by its clock and width. ``l2``: bytes of L2 cache; a smaller one gives less at
    once, too."""

    memory: int
    l2: int


H200 = Chip(4916736, 60 << 20)  #: what constants are fitted to where nothing else is said
H100 = Chip(3352320, 50 << 20)


@cache
def chip_of(device: torch.device) -> Chip:
    """That of a CUDA device with an index; where there is none, an H200's."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    return Chip(**memory_of(check(driver.cuDeviceGet(device.index))))
