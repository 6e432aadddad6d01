"""Casts to fp8 by one scale a tensor, of its largest number: the bits of torchao's Float8Linear with dynamic scales.

What is written here Inductor fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 8  #: tensors that the kernel casts at once
_SMALLEST = 1e-12  # of a maximum that is divided by, as in torchao


class Float8(NamedTuple):
    """A tensor in fp8.

    Attributes:
        numbers: contiguous.
        scale: by which they are multiplied to be what they stand for; float32 of no dimension.
        transposed: of a tensor as matrix [rows, columns] the same [columns, rows], contiguous, if it was asked for.
    """

    numbers: Tensor
    scale: Tensor
    transposed: Tensor | None


def reference_maxima(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute values, float32 [count]; of no numbers 0, of a NaN one."""
    zero = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    return torch.stack([t.abs().amax().float() if t.numel() else zero for t in tensors])


def reference_cast(
    tensors: Sequence[Tensor], maxima: Tensor, dtype: torch.dtype, transposed: Sequence[bool]
) -> list[Float8]:
    """Each by its maximum, which may be that of more numbers. ``transposed``: whether that is asked for."""
    largest, found = torch.finfo(dtype).max, []
    for t, amax, across in zip(tensors, maxima, transposed, strict=True):
        scale = (largest / amax.double().clamp(min=_SMALLEST)).float()
        numbers = (t.float() * scale).clamp(-largest, largest).to(dtype).contiguous()
        matrix = numbers.flatten(0, -2).t().contiguous() if across else None
        found.append(Float8(numbers, scale.reciprocal(), matrix))
    return found
