"""How normed rows become fp8, in plain torch: the steps that follow a norm in frameworks' own code."""

from __future__ import annotations

from typing import NamedTuple

import torch

SCALE_OPS = ("reciprocal", "divide", "multiply")


class QuantKind(NamedTuple):
    """What becomes of a normed row.

    ``scale_op``: what is done with a scale. ``smallest``: bounds it, or what it is made of; None where it is given.
    """

    out_dtype: torch.dtype
    scale_op: str
    smallest: float | None = None

    @property
    def dynamic(self) -> bool:
        return self.smallest is not None


def default_smallest(scale_op: str, out_dtype: torch.dtype) -> float:
    """Of scales in vLLM ("reciprocal"), of maxima in torchao."""
    return 1 / (torch.finfo(out_dtype).max * 512) if scale_op == "reciprocal" else 1e-12


def quantize_rows(
    normed: torch.Tensor, scale: torch.Tensor | None, kind: QuantKind
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows in fp8, and their scales if none is given, [..., 1]. Divisions are rounded correctly."""
    largest = torch.finfo(kind.out_dtype).max
    scales = None if scale is not None else _scales(normed, kind)
    wide = normed.to(torch.float32)
    by = scale.reshape(()) if scale is not None else scales
    assert by is not None, "of the two one is there"
    if kind.scale_op == "divide":
        scaled = wide / by
    else:
        scaled = wide * (by.reciprocal() if kind.scale_op == "reciprocal" else by)
    return scaled.clamp(-largest, largest).to(kind.out_dtype), scales


def _scales(normed: torch.Tensor, kind: QuantKind) -> torch.Tensor:
    """Of each row."""
    amax, smallest = normed.abs().amax(-1, keepdim=True), kind.smallest
    # As a tensor: by a number CUDA's division multiplies with its reciprocal.
    largest = normed.new_full((), torch.finfo(kind.out_dtype).max)
    if kind.scale_op == "reciprocal":
        return (amax.to(torch.float32) / largest.to(torch.float32)).clamp(min=smallest)
    if kind.scale_op == "divide":
        return (amax.clamp(min=smallest) / largest).to(torch.float32)
    # The reciprocal first, as torch takes a number by a tensor.
    return (amax.to(torch.float64).clamp(min=smallest).reciprocal() * largest).to(torch.float32)
