"""A product between a gather and a reduction is fused with the one that should save more."""

from __future__ import annotations

import pytest
from graphs import AG, RS, gather, scatter
from spelled import Fn, Shape, only
from torch import Tensor
from weft.fused_ops.passes import FusionPass

pytestmark = pytest.mark.usefixtures("two")


def between(x: Tensor, w: Tensor) -> Tensor:
    return scatter(gather(x) @ w)


def with_another(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gather has a product left that hides it as well."""
    y = gather(x)
    return scatter(y @ w), y @ v


def weight_gathered(x: Tensor, w: Tensor) -> Tensor:
    return scatter(x @ gather(w))


def result(fn: Fn, *shapes: Shape) -> tuple[list[str | None], str]:
    seen = only(fn, *shapes, fusion=FusionPass(agree=False, collectives=False))
    return seen.fused, seen.reasons


# Between CPU ranks sending what is gathered, 64 x k, or scattered, 64 x n, takes less time than to multiply.
def test_the_one_that_sends_more_has_it() -> None:
    fused, reasons = result(between, (32, 512), (512, 64))
    assert fused == [AG, None]
    assert "its product is fused with the gather before it, which saves" in reasons
    fused, reasons = result(between, (32, 64), (64, 512))
    assert fused == [None, RS]
    assert "its product is fused with the reduction after it" in reasons


def test_a_gather_that_loses_nothing_leaves_it() -> None:
    fused, _ = result(with_another, (32, 512), (512, 64), (512, 4096))
    assert fused == [AG, RS]


def test_a_gathered_weight_leaves_it() -> None:
    fused, _ = result(weight_gathered, (4, 512), (256, 64))
    assert fused == [None, RS]


def test_what_the_gather_cannot_have_is_left_to_the_reduction() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        """Its other operand depends on the gathered tensor."""
        y = gather(x)
        return scatter(y @ (w * y.sum()))

    fused, _ = result(fn, (32, 512), (512, 64))
    assert fused == [None, RS]
