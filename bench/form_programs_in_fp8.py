"""The forms whose norm becomes fp8 after an all-reduce, as vLLM and torchao write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from form_programs import Form, ar, vllm
from torch import Tensor

LARGEST = 448.0


def in_fp8(quantise: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Numbers, scales, and the next residual; the numbers as what they are in float32, which can be compared."""

    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        normed, sums = vllm(ar(x @ w), residual, weight)
        numbers, *scales = quantise(normed, scale)
        return numbers.float(), *scales, sums

    return fn


def saturated(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def given(x: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (saturated(x.float() * scale.reciprocal()),)


def per_token(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    found = (x.abs().max(-1).values.unsqueeze(-1).float() / LARGEST).clamp(min=1 / (512 * LARGEST))
    return saturated(x.float() * found.reciprocal()), found


def per_row(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    found = (x.abs().amax(-1, keepdim=True) / LARGEST).float()
    return saturated(x.float() / found), found


def float8_linear(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    found = (LARGEST / x.abs().amax(-1, keepdim=True).double().clamp(min=1e-12)).float()
    return saturated(x.float() * found), found.reciprocal()


def forms_in_fp8() -> Iterator[tuple[str, list[Form]]]:
    """A part of the table."""
    shapes = (12, 8), (8, 5), (12, 5), (5,), (1,)
    yield (
        "all-reduce, norm, fp8",
        [
            Form("by a given scale (vLLM)", in_fp8(given), shapes),
            Form("by a scale of each row (vLLM)", in_fp8(per_token), shapes),
            Form("by a scale of each row (torchao's quantize_)", in_fp8(per_row), shapes),
            Form("by a scale of each row (Float8Linear)", in_fp8(float8_linear), shapes),
        ],
    )
