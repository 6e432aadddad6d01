"""Rows in fp8 as frameworks' own code makes them, step by step, for tests of what does so in one kernel."""

from __future__ import annotations

from math import inf, nan

import torch
from torch import Tensor
from weft.kernels.float8_cast.reference import Float8

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


def matrices(dtype: torch.dtype) -> list[list[Tensor]]:
    """Of one tile, of several, of a part of one; that lie anyhow; zeros, nothing, something infinite and NaNs."""

    def drawn(*shape: int) -> Tensor:
        return (
            torch.randn(*shape) * torch.exp2(torch.randint(-30, 3, (shape[0], *[1] * (len(shape) - 1))))
        ).to(dtype)

    endless, unknown, tiny = drawn(16, 32), drawn(16, 16), torch.full((16, 16), 2.0**-24).to(dtype)
    endless[3, 5], unknown[2, 7] = -inf, nan
    shifted = torch.empty(1 + 16 * 48, dtype=dtype)[1:].view(16, 48).copy_(drawn(16, 48))
    return [
        [drawn(144, 80), drawn(7, 16), drawn(2, 3, 32)],
        [drawn(272, 64), drawn(48, 160).t(), shifted],
        [torch.zeros(16, 16, dtype=dtype), endless, unknown, tiny, drawn(1, 16)[:0], drawn(5, 7, 16)],
    ]


def check_casts(made: list[Float8], want: list[Float8]) -> None:
    for one, as_torch in zip(made, want, strict=True):
        assert torch.equal(one.scale.nan_to_num(-1), as_torch.scale.nan_to_num(-1)), "scale"
        assert same_bits(one.numbers, as_torch.numbers), "numbers"
        assert (one.transposed is None) == (as_torch.transposed is None)
        if one.transposed is not None and as_torch.transposed is not None:
            assert same_bits(one.transposed, as_torch.transposed), "transposed"
