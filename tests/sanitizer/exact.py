"""Numbers whose sums are exact, and how what comes of them is compared."""

from __future__ import annotations

import sys

import torch
from weft.fused_ops import last_plan

DTYPES = (torch.bfloat16, torch.float32)
CPU = "--cpu" in sys.argv


def numbers(seed: int, rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def put(x: torch.Tensor) -> torch.Tensor:
    """x where the op shall run, with the same strides."""
    return x if CPU else x.cuda()


def fused() -> None:
    """The last call took a kernel."""
    assert last_plan().algorithm != "unfused", last_plan()


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.cpu(), want.to(got.dtype)), f"{what}: wrong result"
