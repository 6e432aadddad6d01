"""Norms after an all-reduce that are near to rms_norm, in spellings that torch.compile does not make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import AR, c10d, check_same
from left import GROUP, W8, X2, seen, two_ranks
from torch import Tensor

__all__ = ["two_ranks"]

aten = torch.ops.aten


def usual(squares: Tensor) -> Tensor:
    return squares.mean(-1, keepdim=True) + 0.1


def by_name(squares: Tensor) -> Tensor:
    return aten.mean.dim(squares, dim=[-1], keepdim=True) + 0.1


def of_everything(squares: Tensor) -> Tensor:
    return squares.mean(None, keepdim=True) + 0.1


def of_no_dimension(squares: Tensor) -> Tensor:
    return aten.mean.dim(squares, [], True) + 0.1


def scaled(squares: Tensor) -> Tensor:
    return aten.add.Scalar(squares.mean(-1, keepdim=True), 0.1, 2)


@pytest.mark.parametrize(
    ("mean", "fused"),
    [(usual, True), (by_name, True), (of_everything, False), (of_no_dimension, False), (scaled, False)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_means(mean: Callable[[Tensor], Tensor], fused: bool) -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y = residual + c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", GROUP[0]))
        return y * torch.rsqrt(mean(y * y)) * weight

    found = seen(fn, X2, W8, torch.randn(6, 5), torch.randn(5))
    assert found.fused == ["weft::fused_all_reduce_rms_norm" if fused else AR]
    check_same(found, 2)


@pytest.mark.parametrize(("exponent", "fused"), [(2, True), (4, False)])
def test_powers(exponent: int, fused: bool) -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y = residual + c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", GROUP[0]))
        return y * torch.rsqrt(usual(y.pow(exponent))) * weight

    found = seen(fn, X2, W8, torch.randn(6, 5), torch.randn(5))
    assert found.fused == ["weft::fused_all_reduce_rms_norm" if fused else AR]
    check_same(found, 2)
