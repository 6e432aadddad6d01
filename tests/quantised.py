"""Rows in fp8 as frameworks' own code makes them, step by step, for tests of what does so in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def by_steps(
    rows: Tensor, scale: Tensor | None, dtype: torch.dtype, scale_op: str, smallest: float
) -> tuple[Tensor, Tensor]:
    """Numbers and scales: as vLLM ("reciprocal"), torchao's quantize_ ("divide") and its Float8Linear ("multiply").

    On the CPU, where division by a number is rounded correctly: CUDA multiplies with its reciprocal.
    """
    device, rows = rows.device, rows.cpu()
    scale = None if scale is None else scale.cpu()
    largest = torch.finfo(dtype).max
    if scale is None:
        amax = torch.amax(torch.abs(rows), dim=-1, keepdim=True)
        if scale_op == "reciprocal":
            scale = torch.clamp(amax.float() / largest, min=smallest)
        elif scale_op == "divide":
            scale = (torch.clamp(amax, min=smallest) / largest).float()
        else:
            scale = (largest / torch.clamp(amax.double(), min=smallest)).float()
    if scale_op == "reciprocal":
        wide = rows.float() * (1 / scale)
    else:
        wide = rows.float() / scale if scale_op == "divide" else rows.float() * scale
    return torch.clamp(wide, min=-largest, max=largest).to(dtype).to(device), scale.to(device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The same numbers in fp8 or float32, zeros with their signs; any NaN is a NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = a.float(), b.float()
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())
