"""Whether a result is right: against float64, as a whole and element by element.

A right result differs from float64 by roundings, each by at most half an ulp of what is rounded: the terms before they
are sent, a ring's sum at each hop, the result. None of these is larger than the sum of the terms' absolute values, so
``roundings`` one after the other bound an element's error, in whatever order the terms are summed.

Inside a product that says nothing: the absolute values of its K terms sum up to sqrt(K) times the result. Its errors
are many and of random sign, also where K is cut in parts that are rounded, as torch lets cuBLAS do. So they are bounded
by what they have together, at most ``MAX_ERROR``: of 2 ** 27 normal values one is beyond 8 times as much with a
probability of 2e-7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# ||result - reference|| / ||reference||. Rounding a result to the dtype costs about a third of it.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
_BEYOND_ALL = 8.0


@dataclass(frozen=True)
class Expected:
    """A result in float64, and by how much each element of a right one may differ from it."""

    reference: Tensor
    allowed: Tensor


def of_sums(reference: Tensor, terms: Tensor, roundings: int, dtype: torch.dtype) -> Expected:
    """A sum of few terms; ``terms`` is the sum of their absolute values."""
    half_ulp = torch.finfo(dtype).eps / 2
    return Expected(reference, terms * ((1 + half_ulp) ** roundings - 1))


def of_products(reference: Tensor, terms: Tensor, roundings: int, dtype: torch.dtype) -> Expected:
    """A sum of matrix products; ``terms`` is the sum of the products' absolute values."""
    expected = of_sums(reference, terms, roundings, dtype)
    typical = reference.norm() / reference.numel() ** 0.5
    expected.allowed.add_(_BEYOND_ALL * MAX_ERROR[dtype] * typical)
    return expected


def _problem(out: Tensor, expected: Expected, dtype: torch.dtype) -> str:
    reference = expected.reference
    if out.numel() != reference.numel():
        return f"wrong result: shape {tuple(out.shape)}, must be {tuple(reference.shape)}"
    difference = out.double().reshape(reference.shape).sub_(reference)
    error = float(difference.norm() / reference.norm())
    if not error <= MAX_ERROR[dtype]:
        return f"wrong result: error {error:.1e}, at most {MAX_ERROR[dtype]:.0e}"
    beyond = (difference.abs_() > expected.allowed).flatten()
    if not beyond.any():
        return ""
    at = int(beyond.byte().argmax())
    return (
        f"wrong result: {int(beyond.sum())} of {beyond.numel()} elements; that at {at} "
        f"by {float(difference.flatten()[at]):.1e}, at most {float(expected.allowed.flatten()[at]):.1e}"
    )


def problem(outs: Sequence[Tensor], expected: Sequence[Expected], dtype: torch.dtype) -> str:
    """What is wrong with an op's results; empty when nothing is."""
    if len(outs) != len(expected):
        return f"wrong result: {len(outs)} tensors, must be {len(expected)}"
    found = (_problem(out, of, dtype) for out, of in zip(outs, expected, strict=True))
    return next((text for text in found if text), "")
