"""Norms after an all-reduce that are near to rms_norm, in spellings that torch.compile does not make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import AR
from spelled import ar, aten, only
from torch import Tensor

pytestmark = pytest.mark.usefixtures("two")


def usual(squares: Tensor) -> Tensor:
    return squares.mean(-1, keepdim=True) + 0.1


SQUARES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "usual": (lambda y: usual(y * y), True),
    "by name": (lambda y: aten.mean.dim(y * y, dim=[-1], keepdim=True) + 0.1, True),
    "of everything": (lambda y: (y * y).mean(None, keepdim=True) + 0.1, False),
    "of no dimension": (lambda y: aten.mean.dim(y * y, [], True) + 0.1, False),
    "scaled": (lambda y: aten.add.Scalar((y * y).mean(-1, keepdim=True), 0.1, 2), False),
    "no mean": (lambda y: (y * y).sum(-1, keepdim=True) + 0.1, False),
    "second power": (lambda y: usual(y.pow(2)), True),
    "fourth power": (lambda y: usual(y.pow(4)), False),
}


@pytest.mark.parametrize("name", SQUARES)
def test_means(name: str) -> None:
    mean, fused = SQUARES[name]

    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y = residual + ar(x @ w)
        return y * torch.rsqrt(mean(y)) * weight

    assert only(fn, (6, 8), (8, 5), (6, 5), (5,)).fused == [
        "weft::fused_all_reduce_rms_norm" if fused else AR
    ]
