"""What is left alone, and why: every near miss of a known form. The graph must not change at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Seen, applied, c10d, check_same, fake_ranks, traced
from torch import Tensor
from weft.fused_ops.passes import FusionPass

GROUP: list[str] = []


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_ranks(2) as group:
        GROUP[:] = [group]
        yield


def ag(x: Tensor, world: int = 2) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, world, GROUP[0]))


def rs(x: Tensor, op: str = "sum", world: int = 2) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, world, GROUP[0]))


def seen(fn: Callable[..., Any], *inputs: Tensor, fusion: FusionPass | None = None) -> Seen:
    return applied(traced(fn, *inputs), fusion)


def check_left(
    fn: Callable[..., Any], reason: str, *inputs: Tensor, fusion: FusionPass | None = None
) -> None:
    found = seen(fn, *inputs, fusion=fusion)
    assert found.entries
    assert set(found.fused) == {None}
    assert reason in found.reasons
    assert str(found.after) == str(found.before)


W3 = torch.randn(3, 8)
X3, X2, W8 = torch.randn(2, 6, 8), torch.randn(6, 8), torch.randn(8, 5)


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


def test_more_parts_than_ranks() -> None:
    check_left(lambda x, w: cat_mm(list(ag(x).split(1)), w), "joins 4 parts", X3, W8)


def test_some_of_more_parts() -> None:
    check_left(lambda x, w: cat_mm(list(ag(x).split(1))[:2], w), "makes 4 parts, not 2", X3, W8)


def test_parts_of_two_tensors() -> None:
    def fn(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return cat_mm([ag(x).split(2)[0], z], w)

    check_left(fn, "no part of", X3, X3, W8)


def test_parts_cut_along_another_dimension() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return cat_mm(list(ag(x).split(3, 1)), w, 0)

    check_left(fn, "does not join the shards", X3, W8)


def test_a_shard_that_is_used_alone() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        parts = ag(x).split(2)
        return cat_mm(list(parts), w), parts[0] + 1

    check_left(fn, "is also used by", X3, W8)


def test_the_gathered_tensor_used_before_it_is_joined() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = ag(x)
        return cat_mm(list(y.split(2)), w), y + 1

    check_left(fn, "used before its shards are joined", X3, W8)


def test_trimmed_rows() -> None:
    check_left(lambda x, w: ag(x)[:10] @ w, "no matrix product takes", X2, W8)


def test_trimmed_columns() -> None:
    check_left(lambda x, w: ag(x)[:, :7] @ w[:7], "no matrix product takes", X2, W8)


def test_a_cast_between() -> None:
    check_left(lambda x, w: ag(x).double() @ w.double(), "no matrix product takes", X2, W8)


def test_scaled_between() -> None:
    check_left(lambda x, w: (ag(x) * 2) @ w, "no matrix product takes", X2, W8)


def test_the_right_operand() -> None:
    check_left(lambda x, w: w @ ag(x), "is the right operand of mm", X2, torch.randn(5, 12))


def test_the_addend() -> None:
    check_left(
        lambda x, a, b: torch.addmm(ag(x), a, b), "no matrix product takes", X2, torch.randn(12, 3), W3
    )


def test_the_transposed_left_operand() -> None:
    check_left(lambda x, w: ag(x).t() @ w, "no matrix product takes", X2, torch.randn(12, 5))


def test_both_operands() -> None:
    def fn(x: Tensor) -> Tensor:
        y = ag(x)
        return y @ y.t()

    check_left(fn, "depends on the gathered tensor", torch.randn(4, 8))


def test_rows_of_another_length() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(ag(x).split(2), 1).reshape(-1, 16) @ w

    check_left(fn, "rows of 16", X3, torch.randn(16, 5))


def test_more_rows_than_the_shards_make() -> None:
    """12 x 8 as 3 x 32 cuts through a shard."""
    check_left(lambda x, w: ag(x).reshape(3, 32) @ w, "3 rows", X2, torch.randn(32, 5))


def test_a_scaled_addmm() -> None:
    check_left(lambda x, w, b: torch.addmm(b, ag(x), w, alpha=2), "scales", X2, W8, torch.randn(5))


def test_batched_products() -> None:
    check_left(lambda x, w: torch.bmm(ag(x), w), "no matrix product takes", X3, torch.randn(4, 8, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
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

    check_left(fn, "writes to memory between", X2, W8)


def test_an_operand_written_before_the_scatter() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        torch.ops.aten.mul_.Scalar(w, 2)
        return rs(y)

    check_left(fn, "writes to memory between", X2, W8)


def test_a_tensor_gathered_again_after_it_was_written() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = ag(x) @ w
        torch.ops.aten.mul_.Scalar(x.view(-1), 2)
        return first, ag(x) @ w

    found = seen(fn, X2, W8)
    assert [e.detail for e in found.entries] == ["1 product", "1 product"]
    check_same(found, 2)


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


def test_more_parts_than_ranks_before_the_scatter() -> None:
    check_left(lambda x, w: rs_cat(list(product(x, w).split(1, 1))), "joins 6 parts", X3, W8)


def test_parts_joined_along_another_dimension() -> None:
    check_left(lambda x, w: rs_cat(list(product(x, w).split(3, 1)), 2), "along dimension 2", X3, W8)


def test_a_part_used_alone() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        parts = product(x, w).split(3, 1)
        return rs_cat(list(parts)), parts[1] * 2

    check_left(fn, "is also used by", X3, W8)


def test_columns_of_another_width() -> None:
    """Heads: the parts are cut from a shape whose rows are not the product's."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rs_cat(list((x @ w).reshape(6, 2, 4).split(1, 1)))

    check_left(fn, "rows of 4", X2, torch.randn(8, 8))


def test_rows_that_are_cut() -> None:
    """3 rows of 8 as 6 of 4: half of them is one row and a half."""
    check_left(lambda x, w: rs((x @ w).reshape(6, 4)), "the 3 rows", torch.randn(3, 5), torch.randn(5, 8))


def test_a_vector_for_half_a_row() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rs((x @ w).reshape(12, 4) + b)

    check_left(fn, "not added to the rows", X2, torch.randn(8, 8), torch.randn(4))


def test_products_of_different_shapes() -> None:
    def fn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return rs((x @ w).reshape(12, 4) + x.reshape(12, 4) @ u)

    check_left(fn, "have different shapes", X2, torch.randn(8, 8), torch.randn(4, 4))


def test_a_sum_without_a_product() -> None:
    check_left(lambda a, b: rs(a + b), "is no matrix product", torch.randn(6), torch.randn(6))
    check_left(lambda a, b: rs(a + b), "of another shape", torch.randn(6, 1), torch.randn(5))


def test_a_flattened_product_and_a_vector_of_its_size() -> None:
    check_left(lambda x, w, r: rs((x @ w).reshape(-1) + r), "is no matrix product", X2, W8, torch.randn(30))


def test_a_product_used_elsewhere() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return rs(y), y

    check_left(fn, "is also used by the graph's output", X2, W8)


def test_a_cast_before_the_scatter() -> None:
    check_left(lambda x, w: rs((x @ w).half()), "not a matrix product", X2, W8)


def test_a_residual_before_the_scatter() -> None:
    check_left(lambda x, w, r: rs(x @ w + r), "which is no matrix product", X2, W8, torch.randn(6, 5))


def test_a_scaled_sum() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return rs(torch.add(x @ w, x @ w, alpha=2))

    check_left(fn, "scales what it adds", X2, W8)


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

    check_left(fn, "not a matrix product", torch.randn(12, 8), W8)


def test_a_batched_product_before_the_scatter() -> None:
    check_left(lambda x, w: rs(torch.bmm(x, w)), "not a matrix product", X3, torch.randn(2, 8, 5))


def test_all_reduce() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", GROUP[0]))

    check_left(fn, "no fused matmul + all_reduce yet", X2, W8)


def test_all_reduce_of_something_else() -> None:
    def fn(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x.sin(), "sum", GROUP[0]))

    check_left(fn, "not a matrix product", X2)


def test_coalesced() -> None:
    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        return [c10d.wait_tensor(t) @ w for t in c10d.all_gather_into_tensor_coalesced([x, x], 2, GROUP[0])]

    check_left(fn, "of one tensor only", X2, W8)


def test_into_given_memory() -> None:
    def fn(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, GROUP[0], out=out)) @ w

    check_left(fn, "of one tensor only", X2, W8, torch.randn(12, 8))


def test_used_without_waiting() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        pending = c10d.all_gather_into_tensor(x, 2, GROUP[0])
        return c10d.wait_tensor(pending) @ w, pending + 1

    check_left(fn, "one wait_tensor as its only user", X2, W8)


def test_for_another_number_of_ranks() -> None:
    check_left(lambda x, w: ag(x, 4) @ w, "for 4 ranks, the group has 2", X2, W8)


def test_an_unknown_group() -> None:
    graph = traced(lambda x, w: ag(x) @ w, X2, W8)
    (node,) = [n for n in graph.nodes if n.target is c10d.all_gather_into_tensor.default]
    node.args = (*node.args[:2], "nobody")
    assert "no process group is named 'nobody'" in applied(graph).reasons


def test_a_group_that_the_pass_is_not_for() -> None:
    check_left(
        lambda x, w: ag(x) @ w, "none of those this pass is for", X2, W8, fusion=FusionPass(groups=["other"])
    )


def test_a_group_of_one_rank() -> None:
    torch.distributed.destroy_process_group()
    with fake_ranks(1) as group:
        GROUP[:] = [group]
        check_left(lambda x, w: ag(x, 1) @ w, "has one rank", X2, W8)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())
