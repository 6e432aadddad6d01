"""Scatters that are left alone, and why: every near miss of a known form. The graph must not change at all."""

from __future__ import annotations

import pytest
import torch
from graphs import traced
from left import GROUP, W8, X2, X3, ag, check_left, rs, two_ranks
from torch import Tensor
from weft.fused_ops.library import schema
from weft.fused_ops.passes.graph import rewrite
from weft.fused_ops.passes.graph.nodes import LeftAlone

__all__ = ["two_ranks"]


def test_an_operand_written_before_the_scatter() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        torch.ops.aten.mul_.Scalar(w, 2)
        return rs(y)

    check_left(fn, "writes to memory between", X2, W8)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_other_reductions(op: str) -> None:
    check_left(lambda x, w: rs(x @ w, op), f"reduces by '{op}'", X2, W8)


def rs_cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    return rs(torch.cat(parts, dim))


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.reshape(-1, 8) @ w).reshape(2, 6, 5)


def test_swapped_parts_before_the_scatter() -> None:
    check_left(lambda x, w: rs_cat(list(product(x, w).split(3, 1))[::-1]), "in the order 1, 0", X3, W8)


def test_swapped_slices_before_the_scatter() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = product(x, w)
        return rs_cat([y[:, 3:6], y[:, 0:3]])

    check_left(fn, "starts at 3, where 0 is next", X3, W8)


def test_parts_that_cover_half() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = product(x, w)
        return rs_cat([y[:, 0:1], y[:, 1:2]])

    check_left(fn, "end at 2", X3, W8)


def test_a_part_used_alone() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        parts = product(x, w).split(3, 1)
        return rs_cat(list(parts)), parts[1] * 2

    check_left(fn, "is also used by", X3, W8)


def test_rows_that_are_cut() -> None:
    """3 rows of 8 as 6 of 4: half of them is one row and a half."""
    check_left(
        lambda x, w: rs((x @ w).reshape(6, 4)), "3 x 8 cuts through", torch.randn(3, 5), torch.randn(5, 8)
    )


def test_a_vector_for_half_a_row() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rs((x @ w).reshape(12, 4) + b)

    check_left(fn, "not added to the rows", X2, torch.randn(8, 8), torch.randn(4))


def test_products_of_different_shapes() -> None:
    def fn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return rs((x @ w).reshape(12, 4) + x.reshape(12, 4) @ u)

    check_left(fn, "have different shapes", X2, torch.randn(8, 8), torch.randn(4, 4))


def test_a_sum_without_a_product() -> None:
    check_left(
        lambda a, b: rs(a + b), "adds b_1 (placeholder), not a matrix product", torch.randn(6), torch.randn(6)
    )
    check_left(lambda a, b: rs(a + b), "of another shape", torch.randn(6, 1), torch.randn(5))


def test_a_flattened_product_and_a_vector_of_its_size() -> None:
    check_left(
        lambda x, w, r: rs((x @ w).reshape(-1) + r), "adds r_1 (placeholder), not a", X2, W8, torch.randn(30)
    )


def test_a_product_used_elsewhere() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return rs(y), y

    check_left(fn, "is also used by the graph's output", X2, W8)


def test_a_cast_before_the_scatter() -> None:
    check_left(lambda x, w: rs((x @ w).half()), "twice as many bytes", X2, W8)


def test_a_residual_before_the_scatter() -> None:
    check_left(lambda x, w, r: rs(x @ w + r), "adds r_1 (placeholder), not a", X2, W8, torch.randn(6, 5))


def test_the_reason_names_what_adds_and_not_what_only_reorders() -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return rs(torch.ops.aten.permute.default(x @ w + r.clone().t(), [0, 1]))

    check_left(fn, "add (add.Tensor) adds r_1 (placeholder), not a", X2, W8, torch.randn(5, 6))


def test_a_sum_scaled_by_infinity() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rs(torch.add(x @ w, x @ w, alpha=float("inf")))

    check_left(fn, "multiplies what it adds by inf", X2, W8)


def test_a_column_added() -> None:
    check_left(lambda x, w, b: rs(x @ w + b), "of another shape", X2, W8, torch.randn(6, 1))


def test_a_bias_before_a_scatter_of_columns() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rs_cat(list(torch.addmm(b, x, w).split(2, 1)))

    check_left(fn, "other columns", X2, torch.randn(8, 4), torch.randn(4))


def test_a_permutation_whose_parts_cut_through_rows() -> None:
    """3 x 6 x 4 moved to 3 x 4 x 6 and flattened: half of it is no half of a dimension."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rs((x @ w).reshape(4, 3, 5).permute(1, 0, 2).reshape(12, 5))

    check_left(fn, "cuts through", torch.randn(12, 8), W8)


def test_a_batched_product_before_the_scatter() -> None:
    check_left(lambda x, w: rs(torch.bmm(x, w)), "a batch of products", X3, torch.randn(2, 8, 5))


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_that_are_no_multiple_of_the_ranks(rows: int) -> None:
    check_left(lambda x, w: rs(x @ w), "no multiple of 2 ranks", torch.randn(rows, 8), W8)


def test_a_product_of_another_dtype_than_its_operands() -> None:
    """In float32, unrounded: the op would send bfloat16."""
    x, w = X2.bfloat16(), W8.bfloat16()
    check_left(
        lambda x, w: rs(torch.mm(x, w, out_dtype=torch.float32)), "another dtype than its operands", x, w
    )
    check_left(
        lambda x, w: torch.mm(ag(x), w, out_dtype=torch.float32), "mm.dtype): it has another dtype", x, w
    )


def test_what_an_op_does_not_take() -> None:
    """A form that is found where the op has no such sizes is left alone, with the op's words."""
    graph = traced(torch.mm, torch.randn(7, 8), W8)
    before, names = graph.output_node(), [n.name for n in graph.nodes]
    A, B = graph.find_nodes(op="placeholder")
    with pytest.raises(LeftAlone, match="A @ B has size 7 there, must be a multiple of 2 ranks"):
        rewrite.call(before, schema.matmul_reduce_scatter, A, B, "sum", 0, GROUP[0])
    assert [n.name for n in graph.nodes] == names


def test_tensors_to_concatenate_are_a_list() -> None:
    """As tracers have them: Inductor of torch 2.11 takes no tuple."""
    graph = traced(lambda a, b: a + b, X2, X2)
    (a, b), out = graph.find_nodes(op="placeholder"), graph.output_node()
    whole = rewrite.call(out, torch.ops.aten.cat.default, (a, b), 1)
    assert isinstance(whole.args[0], list) and whole.meta["val"].shape == (X2.shape[0], 2 * X2.shape[1])
