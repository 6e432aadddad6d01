"""Near misses of LayerNorms after an all-reduce, and what the report says of those."""

from __future__ import annotations

import pytest
import torch
from graphs import AR, captured, check_same
from test_layer_norm_forms import EPS, HIDDEN, NORM, Fn, ar, inputs, of_product, only, torch_norm
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("two")


def scale(wide: Tensor, variance: Tensor) -> Tensor:
    return (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(variance + EPS)


def divided_by_one_less(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    variance, mean = torch.var_mean(y, -1, correction=1, keepdim=True)
    return ((y - mean) * torch.rsqrt(variance + EPS) * weight + bias).to(x.dtype)


def variance_of_a_part(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    part = y[..., :3] - y.mean(-1, keepdim=True)
    return (scale(y, part.pow(2).mean(-1, keepdim=True)) * weight).to(x.dtype)


def mean_of_a_part(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    away = y - y[..., :3].mean(-1, keepdim=True)
    return (away * torch.rsqrt(away.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def mean_of_columns(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    away = y - y.mean(-2, keepdim=True)
    return (away * torch.rsqrt(away.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def variance_of_columns(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    away = y - y.mean(-1, keepdim=True)
    return (away * torch.rsqrt(away.pow(2).mean(-2, keepdim=True) + EPS) * weight).to(x.dtype)


def variance_around_nothing(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    return (scale(y, y.pow(2).mean(-1, keepdim=True)) * weight + bias).to(x.dtype)


def mean_that_stays(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of the mean and the variance, only the latter is used."""
    y = (residual + x).float()
    variance, _ = torch.var_mean(y, -1, correction=0, keepdim=True)
    return (y * torch.rsqrt(variance + EPS) * weight + bias).to(x.dtype)


def weight_first(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch_norm((residual + x).float() * weight, None, bias.float()).to(x.dtype)


def subtracted(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    return (scale(-y, (y - y.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)) * weight).to(x.dtype)


def two_dimensions(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(residual + x, residual.shape[1:], residual[0], residual[1])


def columns_of_squares(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x)[:, :HIDDEN].float()
    return torch_norm(y.transpose(1, 2), weight.float(), bias.float()).to(x.dtype)


def unrounded(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float() + residual.float()
    return torch_norm(wide, weight.float(), bias.float()).to(x.dtype), wide.to(x.dtype)


def used_in_float32(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    wide = (residual + x).float()
    return torch_norm(wide, weight.float(), bias.float()).to(x.dtype), wide.sin()


def mean_used(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = (residual + x).float()
    variance, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
    return ((y - mean) * torch.rsqrt(variance + EPS) * weight + bias).to(x.dtype), mean.sin()


def wide_result(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch_norm((residual + x).float(), weight.float(), bias.float())


def weight_of_the_sum(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = residual + x
    return torch_norm(y, weight * y[0, 0], bias)


def bias_of_the_sum(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = residual + x
    return torch_norm(y, weight, bias * y[0, 0])


def of_two_dtypes(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    return (torch_norm(y) * weight.float() + bias.double().float().sin()).to(x.dtype)


def residual_twice(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch_norm(torch.add(x, residual, alpha=2), weight, bias)


def scaled_twice(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (residual + x).float()
    variance, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
    root = torch.rsqrt(variance + EPS)
    return ((y - mean) * root * weight * root).to(x.dtype)


# Near misses, which are only reduced, and what the report says of the norm; "" where it is seen to be none.
LEFT: dict[Fn, str] = {
    divided_by_one_less: "divides by another number than their length",
    variance_of_a_part: "",
    mean_of_a_part: "",
    mean_of_columns: "is another step than a norm has there",
    variance_of_columns: "is another step than a norm has there",
    variance_around_nothing: "is another step than a norm has there",
    mean_that_stays: "is another step than a norm has there",
    weight_first: "",
    subtracted: "is another step than a norm has there",
    two_dimensions: "is not of its rows",
    columns_of_squares: "",
    unrounded: "it is of the unrounded sum",
    used_in_float32: "also used by sin (sin.default)",
    mean_used: "sin (sin.default) is another step than a norm has there",
    wide_result: "its result is not torch.bfloat16",
    weight_of_the_sum: "is computed after the sum",
    bias_of_the_sum: "is computed after the sum",
    of_two_dtypes: "sin (sin.default) is torch.float32, its weight torch.bfloat16",
    residual_twice: "adds something else than a residual",
    scaled_twice: "is used by",
}


@pytest.mark.parametrize("norm", LEFT, ids=lambda f: f.__name__)
def test_near_misses_are_only_reduced(norm: Fn) -> None:
    (seen,) = captured(of_product(norm), *inputs(torch.bfloat16))
    assert seen.fused == [AR], seen.entries
    assert LEFT[norm] in seen.entries[0].detail, seen.entries[0].detail
    assert ("the norm after it stays" in seen.entries[0].detail) == bool(LEFT[norm])
    check_same(seen, 2)


def test_along_the_other_dimension_of_a_square() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y = residual + ar(x @ w)
        variance, mean = torch.var_mean(y, 0, correction=0, keepdim=True)
        return (y - mean) * torch.rsqrt(variance + EPS) * weight

    (seen,) = captured(fn, *(torch.randn(s) for s in ((6, 8), (8, 6), (6, 6), (6,))))
    assert seen.fused == [AR] and "is not of its rows" in seen.entries[0].detail, seen.entries
    check_same(seen, 2)


def test_of_two_dimensions_it_stays_whole() -> None:
    seen = only(of_product(two_dimensions))
    assert seen.fused == [AR] and "is not of its rows" in seen.entries[0].detail, seen.entries


def test_a_mean_of_what_is_not_decomposed() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        normed, mean, _ = torch.native_layer_norm(residual + ar(x @ w), (HIDDEN,), weight, bias, EPS)
        return normed, mean

    seen = only(fn, *inputs(torch.float32))
    assert seen.fused == [AR] and "its mean or its root is also used" in seen.entries[0].detail


def a_bias_that_is_written(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Between its cast, before the collective, and the norm."""
    wide = bias.to(torch.float32, copy=True)
    bias.mul_(2)
    y = (residual + ar(x @ w)).float()
    variance, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
    return ((y - mean) * torch.rsqrt(variance + EPS) * weight + wide).to(x.dtype)


def a_residual_in_place(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = residual.add_(ar(x @ w))
    return torch_norm(y, weight, bias)


def test_what_is_written_in_between() -> None:
    seen = only(a_bias_that_is_written)
    assert seen.fused == [AR] and "writes to memory" in seen.entries[0].detail, seen.entries
    (seen,) = captured(a_residual_in_place, *inputs(torch.bfloat16))
    assert seen.fused == [NORM], seen.entries
    check_same(seen, 2)
