"""Near misses of all-reduces that are merged, or fused with their product or the norm after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import AR, c10d, check_same
from test_all_reduce_forms import AR_NORM, MM_AR, Norm, U, W, X, ar, form, group, hf_norm, only
from torch import Tensor

__all__ = ["group"]

R, G = torch.randn(6, 5), torch.randn(5)


def used_alone_before(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    y = ar(x @ u)
    return ar(x @ w) + y, y.sin()


def pending_before(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    pending = c10d.all_reduce(x @ u, "sum", "0")
    return ar(x @ w) + c10d.wait_tensor(pending), pending


@pytest.mark.parametrize("fn", [used_alone_before, pending_before], ids=lambda f: f.__name__)
def test_one_that_was_left_and_is_used_alone_is_not_reduced_again(
    fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "why_not_profitable", lambda *args, **kwargs: "too large")
    assert set(only(lambda x, w, u: ar(x @ u) + ar(x @ w), X, W, U).fused) == {"_c10d_functional::all_reduce"}
    seen = only(fn, X, W, U)
    assert seen.fused == [None, None]
    assert str(seen.after) == str(seen.before)


def test_a_product_of_just_enough_bytes_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_least, op in ((6 * 5 * 4, "weft::" + MM_AR), (6 * 5 * 4 + 1, AR)):
        monkeypatch.setattr(form, "MATMUL_FROM", at_least)
        assert only(lambda x, w: ar(x @ w), X, W).fused == [op]


def layer_of(norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = residual + ar(x @ w)
        return norm(y, weight), y

    return fn


def weight_made_later(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + ar(x @ w)
    return hf_norm(y, weight.sin()), y


def pending_with_norm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    pending = c10d.all_reduce(x @ w, "sum", "0")
    return hf_norm(residual + c10d.wait_tensor(pending), weight), pending


def another_strides(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual.reshape(5, 6).t() + ar(x @ w)
    return hf_norm(y, weight), y


def mean_in_float64(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + ar(x @ w)
    mean = y.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
    return weight * (y * torch.rsqrt(mean + 1e-6)).to(y.dtype), y


@pytest.mark.parametrize(
    "fn", [weight_made_later, pending_with_norm, another_strides, mean_in_float64], ids=lambda f: f.__name__
)
def test_near_layers_are_only_reduced(fn: Callable[..., Any]) -> None:
    assert only(layer_of(hf_norm), X, W, R, G).fused == ["weft::" + AR_NORM]
    seen = only(fn, X, W, R, G)
    assert seen.fused == [AR]
    check_same(seen, 2)


def test_no_collective_of_the_group_is_overtaken_for_a_norm() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        pending = c10d.all_reduce(x @ w, "sum", "0")
        other = ar(x.sin(), "product")
        y = residual + c10d.wait_tensor(pending)
        return hf_norm(y, weight), y, other

    seen = only(fn, X, W, R, G)
    assert seen.fused == [AR, None]
    names = [n.target._schema.name for n in seen.after.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert names.index(AR) < names.index("_c10d_functional::all_reduce")
    check_same(seen, 2)
