"""The programs that torch's own pass fuses into wrong or failing ones, by the numbers of that list.

Here each is left as it was, and the report says why. Three are forms that can be fused rightly after all (four chunks
in order, a product in another shape, an addend after the gather): those may be fused and must compute the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import check_same
from left import X2, X3, ag, check_left, rs, seen, two_ranks
from torch import Tensor

__all__ = ["two_ranks"]

W, W4 = torch.randn(8, 5), torch.randn(8, 4)


def left(fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    """For reasons that are worded elsewhere."""
    found = seen(fn, *inputs)
    assert found.entries
    assert all(e.fused_into is None and e.reason for e in found.entries)
    assert str(found.after) == str(found.before)


def rows(y: Tensor, w: Tensor) -> Tensor:
    return y.reshape(-1, y.shape[-1]) @ w


def test_1_swapped_chunks_of_a_gather() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b = ag(x).split(2)
        return rows(torch.cat([b, a], 1), w)

    left(fn, X3, W)


def test_1_swapped_slices_of_a_gather() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return rows(torch.cat([y[2:4], y[0:2]], 1), w)

    left(fn, X3, W)


def test_1_swapped_chunks_before_a_scatter() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b = rows(x, w).reshape(2, 6, 5).split(3, 1)
        return rs(torch.cat([b, a]))

    left(fn, X3, W)


def test_2_overlapping_slices() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return rows(torch.cat([y[0:2], y[1:3]], 1), w)

    left(fn, X3, W)


def test_2_four_chunks_for_two_ranks() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rows(torch.cat(ag(x).split(1), 1), w)

    found = seen(
        fn, X3, W
    )  # joined, they are in the order of the ranks again: to be fused, but not as two chunks
    check_same(found, 2)


def test_3_a_scatter_of_half() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = rows(x, w).reshape(2, 6, 5)
        return rs(torch.cat([y[:, 0:1], y[:, 1:2]]))

    left(fn, X3, W)


def test_4_a_gather_that_is_trimmed() -> None:
    left(lambda x, w: ag(x)[:10] @ w, X2, W)


def test_4_a_gather_of_uneven_shards() -> None:
    """Fewer rows are cut off than there are ranks: they are cut off the product."""
    found = seen(lambda x, w: ag(x)[:11] @ w, X2, W)
    assert all(e.fused_into for e in found.entries)
    check_same(found, 2)


def test_4_columns_that_are_trimmed() -> None:
    left(lambda x, w: ag(x)[:, :7] @ w[:7], X2, W)


def test_5_a_product_in_another_shape() -> None:
    """[4, 3, 8] as [2, 6, 8]: what is scattered are not the dimensions of the product's operand."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rs(torch.cat(rows(x, w).reshape(2, 6, 4).split(3, 1)))

    found = seen(fn, torch.randn(4, 3, 8), W4)
    check_same(found, 2)


def test_5_a_product_whose_rows_are_cut() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rs(torch.cat(rows(x, w).reshape(3, 8, 2).split(4, 1)))

    found = seen(fn, torch.randn(4, 3, 8), W4)
    check_same(found, 2)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_6_reductions_that_are_no_sum(op: str) -> None:
    check_left(lambda x, w: rs(x @ w, op), f"reduces by '{op}'", X2, W)


def test_7_bits_of_another_width() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ag(x).view(torch.bfloat16) @ w

    check_left(fn, "its input is torch.int32", X2.to(torch.int32), torch.randn(16, 5, dtype=torch.bfloat16))
    left(fn, X2, torch.randn(16, 5, dtype=torch.bfloat16))


def test_8_an_addend_that_is_computed_after_the_gather() -> None:
    """The fused op stands where the gather stood, and the sum where its last operand is there."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = ag(x)
        late = (b * 2).sin()
        return torch.addmm(late, y, w)

    found = seen(fn, X2, W, torch.randn(5))
    assert found.fused != [None], found.reasons
    check_same(found, 2)
