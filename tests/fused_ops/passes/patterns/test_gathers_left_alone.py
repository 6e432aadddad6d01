"""Gathers that are left alone, and why: every near miss of a known form. The graph must not change at all."""

from __future__ import annotations

import pytest
import torch
from graphs import c10d, check_same
from left import GROUP, W3, W8, X2, X3, ag, check_left, seen, two_ranks
from torch import Tensor

__all__ = ["two_ranks"]


def cat_mm(parts: list[Tensor], w: Tensor, dim: int = 1) -> Tensor:
    y = torch.cat(parts, dim)
    return y.reshape(-1, y.shape[-1]) @ w


def test_swapped_shards() -> None:
    check_left(lambda x, w: cat_mm(list(ag(x).split(2))[::-1], w), "in the order 1, 0", X3, W8)


def test_one_shard_twice() -> None:
    check_left(lambda x, w: cat_mm([ag(x).split(2)[0]] * 2, w), "in the order 0, 0", X3, W8)


def test_swapped_slices() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return cat_mm([y[2:4], y[0:2]], w)

    check_left(fn, "starts at 2, where 0 is next", X3, W8)


def test_overlapping_slices() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return cat_mm([y[0:2], y[1:3]], w)

    check_left(fn, "starts at 1, where 2 is next", X3, W8)


def test_slices_with_steps() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return cat_mm([y[0:4:2], y[1:4:2]], w)

    check_left(fn, "takes not every element", X3, W8)


def test_slices_that_end_early() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return cat_mm([y[0:1], y[1:2]], w)

    check_left(fn, "end at 2", X3, W8)


def test_some_of_more_parts() -> None:
    check_left(lambda x, w: cat_mm(list(ag(x).split(1))[:2], w), "makes 4 parts, not 2", X3, W8)


def test_parts_of_two_tensors() -> None:
    def fn(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return cat_mm([ag(x).split(2)[0], z], w)

    check_left(fn, "no part of", X3, X3, W8)


def test_trimmed_rows() -> None:
    check_left(lambda x, w: ag(x)[:10] @ w, "no matrix product takes", X2, W8)


def test_trimmed_columns() -> None:
    check_left(lambda x, w: ag(x)[:, :7] @ w[:7], "no matrix product takes", X2, W8)


def test_a_cast_between() -> None:
    check_left(lambda x, w: ag(x).double() @ w.double(), "another dtype or layout", X2, W8)


def test_scaled_between_by_a_tensor() -> None:
    check_left(lambda x, w, s: (ag(x) * s) @ w, "no matrix product takes", X2, W8, torch.tensor(2.0))


def test_the_addend() -> None:
    check_left(
        lambda x, a, b: torch.addmm(ag(x), a, b), "no matrix product takes", X2, torch.randn(12, 3), W3
    )


def test_both_operands() -> None:
    def fn(x: Tensor) -> Tensor:
        y = ag(x)
        return y @ y.t()

    check_left(fn, "depends on the gathered tensor", torch.randn(4, 8))


def test_more_rows_than_the_shards_make() -> None:
    """12 x 8 as 3 x 32 cuts through a shard."""
    check_left(lambda x, w: ag(x).reshape(3, 32) @ w, "3 x 32 cuts through", X2, torch.randn(32, 5))


def test_an_addmm_scaled_by_zero() -> None:
    check_left(lambda x, w, b: torch.addmm(b, ag(x), w, alpha=0), "scales", X2, W8, torch.randn(5))


def test_batched_products() -> None:
    check_left(
        lambda x, w: torch.bmm(ag(x), w), "a batch of products with different", X3, torch.randn(4, 8, 5)
    )


def test_fp8_that_is_cast() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ag(x).float() @ w

    check_left(fn, "twice as many bytes would be sent", X2.to(torch.float8_e4m3fn), W8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ag(x).float() @ w

    check_left(fn, f"its input is {dtype}", X2.to(dtype), W8)


def test_bits_of_another_dtype() -> None:
    """int32 seen as bfloat16 has twice the columns."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ag(x).view(torch.bfloat16) @ w

    check_left(fn, "its input is torch.int32", X2.to(torch.int32), torch.randn(16, 5, dtype=torch.bfloat16))


def test_bits_of_another_dtype_of_the_same_width() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ag(x).view(torch.bfloat16) @ w

    check_left(fn, "no matrix product takes", X2.half(), W8.bfloat16())


def test_a_weight_written_between() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        pending = c10d.all_gather_into_tensor(x, 2, GROUP[0])
        torch.ops.aten.copy_.default(x, x + 1)
        return c10d.wait_tensor(pending) @ w, x

    check_left(fn, "writes to memory before mm", X2, W8)


def test_a_tensor_gathered_again_after_it_was_written() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = ag(x) @ w
        torch.ops.aten.mul_.Scalar(x.view(-1), 2)
        return first, ag(x) @ w

    found = seen(fn, X2, W8)
    assert [e.detail for e in found.entries] == ["1 product", "1 product"]
    check_same(found, 2)
