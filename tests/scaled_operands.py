"""fp8 operands with scales for the tests of the scaled ops, and what they stand for, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ("tensor", "rows", "blocks")
# Of one rounding of a result; float32 sums of some hundred terms, and scales multiplied to them.
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@dataclass
class Scaled:
    """An operand, its scales, and what it stands for."""

    numbers: torch.Tensor
    scale: torch.Tensor
    meant: torch.Tensor


def _drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def _blocks(extent: int) -> int:
    return -(-extent // 128)


def left(kind: str, *shape: int, dtype: torch.dtype = E4M3) -> Scaled:
    """A [..., K] as a kind of scaling has it; block-wise scales lie with rows contiguous, as torch wants them."""
    *lead, k = shape
    numbers = _drawn(*shape, dtype=dtype)
    if kind == "tensor":
        scale = torch.full((), 0.37)
        whole = scale
    elif kind == "rows":
        whole = scale = torch.rand(*lead, 1) + 0.1
    else:
        scale = (torch.rand(_blocks(k), *lead) + 0.1).movedim(0, -1)
        whole = scale.repeat_interleave(128, -1)[..., :k]
    return Scaled(numbers, scale, numbers.double() * whole.double())


def right(kind: str, k: int, n: int, dtype: torch.dtype = E4M3) -> Scaled:
    """B [K, N], column-major."""
    numbers = _drawn(n, k, dtype=dtype).t()
    if kind == "tensor":
        scale = torch.rand(1) + 0.1
        whole = scale
    elif kind == "rows":
        whole = scale = torch.rand(1, n) + 0.1
    else:
        scale = torch.rand(_blocks(k), _blocks(n)) + 0.1
        whole = scale.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return Scaled(numbers, scale, numbers.double() * whole.double())
