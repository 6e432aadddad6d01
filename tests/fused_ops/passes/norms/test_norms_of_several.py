"""Norms of what several all-reduces add up to: attention and MLP side by side, as in Phi, Falcon, GPT-J and Cohere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import AR, captured, check_same
from test_layer_norm_forms import EPS, HIDDEN, ar, by_hand
from test_norm_forms import hf_norm
from torch import Tensor
from torch.nn import functional as F

LAYER, RMS = "weft::fused_all_reduce_layer_norm", "weft::fused_all_reduce_rms_norm"
Norm = Callable[[Tensor, Tensor], Tensor]
Fn = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("two")


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), weight, weight, EPS)


def phi(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    y = ar(x @ w) + ar(x.relu() @ v) + residual
    return norm(y, weight), y


def residual_first(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """As in GPT-NeoX and Cohere."""
    y = residual + ar(x @ w) + ar(x.relu() @ v)
    return norm(y, weight), y


def no_residual(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return norm(ar(x @ w) + ar(x.relu() @ v), weight) + residual


def of_three(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    y = residual + ar(x @ w) + ar(x.relu() @ v) + ar(x.sin() @ w)
    return norm(y, weight), y


def two_residuals(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    y = residual + ar(x @ w) + residual.sin() + ar(x.relu() @ v)
    return norm(y, weight)


def part_used(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """What the first two add up to is used, too: only the second is part of the norm's sum."""
    first = residual + ar(x @ w)
    y = first + ar(x.relu() @ v)
    return norm(y, weight), first.sin()


def another_between(norm: Norm, x: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    first = ar(x @ w)
    second = ar(x.relu() @ v)
    other = ar(x.sin().cumsum(0))
    return norm(residual + first + second, weight), other


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = ((2, 6, 8), (8, HIDDEN), (8, HIDDEN), (2, 6, HIDDEN), (HIDDEN,))
    return [torch.randn(s).to(dtype) for s in shapes]


@pytest.mark.parametrize(("norm", "op"), [(layer, LAYER), (by_hand, LAYER), (hf_norm, RMS)])
@pytest.mark.parametrize("fn", [phi, residual_first, no_residual, of_three], ids=lambda f: f.__name__)
def test_they_are_one_with_the_norm(fn: Fn, norm: Norm, op: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (seen,) = captured(lambda *given: fn(norm, *given), *inputs(dtype))
        count = 3 if fn is of_three else 2
        assert seen.fused == [op] * count, seen.entries
        added = "" if fn is no_residual else "residual added, "
        word = "rms_norm" if op is RMS else "layer_norm"
        assert seen.entries[0].detail == f"{count} all-reduces as one, {added}{word}"
        assert not seen.after.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)
        check_same(seen, 2)


def test_more_residuals_are_added_to_each_other() -> None:
    (seen,) = captured(lambda *given: two_residuals(layer, *given), *inputs())
    assert seen.fused == [LAYER] * 2, seen.entries
    check_same(seen, 2)


def test_of_a_part_that_is_used_it_has_the_rest() -> None:
    (seen,) = captured(lambda *given: part_used(layer, *given), *inputs())
    assert sorted(map(str, seen.fused)) == sorted([AR, LAYER]), seen.entries
    check_same(seen, 2)


def test_none_is_overtaken() -> None:
    (seen,) = captured(lambda *given: another_between(layer, *given), *inputs())
    assert LAYER not in seen.fused, seen.entries
    assert "would be overtaken" in seen.entries[0].detail
    check_same(seen, 2)


def test_float16_is_not_summed_before_it_is_sent() -> None:
    (seen,) = captured(lambda *given: residual_first(layer, *given), *inputs(torch.float16))
    assert sorted(map(str, seen.fused)) == sorted([AR, LAYER]), seen.entries
    check_same(seen, 2)
