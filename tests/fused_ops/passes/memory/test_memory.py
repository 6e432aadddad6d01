"""What is made of a gathered tensor shares memory after the pass as before, and holds what was written before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import AG, captured, check_same, count, scatter
from spelled import ag, aten, check_left, only
from torch import Tensor

pytestmark = pytest.mark.usefixtures("two")
X2, W8 = (6, 8), (8, 5)


def side_by_side(y: Tensor) -> Tensor:
    return torch.cat(y.split(6), 1)


def two_joined(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    a, b = side_by_side(y), side_by_side(y)
    return a @ w.repeat(2, 1), a, b


def two_transposed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    return x.t().repeat(1, 2) @ y, y.t().contiguous(), y.t().contiguous()


def two_cast(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    a, b = (aten._to_copy(y, dtype=torch.bfloat16) for _ in range(2))
    return a @ w.bfloat16(), a, b


def two_gathered(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ag(x) @ w, ag(x), ag(x)


def views_of_one(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    return y @ w, y, y.view(-1), y.t()


def one_of_two_written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    a, b = side_by_side(y), side_by_side(y)
    z = a @ w.repeat(2, 1)
    b.mul_(2)
    return z, a


def copied_after_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    z = side_by_side(y) @ w.repeat(2, 1)
    y.view(-1).mul_(2)
    return z, side_by_side(y)


@pytest.mark.parametrize(
    "fn",
    [
        two_joined,
        two_transposed,
        two_cast,
        two_gathered,
        views_of_one,
        one_of_two_written,
        copied_after_a_write,
    ],
)
def test_memory(fn: Callable[..., tuple[Tensor, ...]]) -> None:
    assert AG in only(fn, X2, W8).fused


def test_a_cast_after_a_write_is_left() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = ag(x)
        a = aten._to_copy(y, dtype=torch.bfloat16)
        z = a @ w.bfloat16()
        a.view(-1).mul_(2)
        return z, aten._to_copy(y, dtype=torch.bfloat16)

    check_left(fn, "uses the gathered tensor after mul_", X2, W8)


def test_what_is_gathered_in_another_order_is_copied_once() -> None:
    """Into the tensor that others use; it was copied into that from which the graph made it, too."""
    x, w = (torch.randn(s, requires_grad=True) for s in ((6, 8), (8, 16)))
    _, backward = captured(lambda x, w: scatter(x @ w, 1), x, w)
    assert backward.fused == [AG]
    assert count(backward.after, "aten::cat") == 0
    check_same(backward, 2)
