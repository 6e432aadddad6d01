"""Scatters that are fused beyond the plain spellings of test_patterns.py: sums, casts, orders, heads.

Where a graph can be written in torch it is compiled, forward and backward; each has twins that differ in one condition.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, RS, captured, check_same, fake_ranks, gather, scatter
from spelled import Fn, ag, check_left, only, rs
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


def from_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return scatter(F.linear(x.bfloat16(), w.bfloat16()).float(), 1)


def saved(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = scatter(F.linear(x, w), 1)
    return y, y.sin() * y


def heads_scattered(x: Tensor, w: Tensor) -> Tensor:
    """[batch, sequence, heads, size], each rank gets some of the heads: columns of the product."""
    return scatter((x @ w).unflatten(-1, (6, 2)), 2)


def heads_moved(x: Tensor, w: Tensor) -> Tensor:
    """[batch, heads, sequence, size], each rank gets a part of the sequence."""
    return scatter((x @ w).unflatten(-1, (3, 4)).transpose(1, 2), 2)


def of_two(x: Tensor, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(F.linear(x, a) + F.linear(z, b), 1)


def of_three(x: Tensor, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(F.linear(x, a) + F.linear(z, b) + F.linear(x * z, a), 1)


def sequence_first(x: Tensor, w: Tensor) -> Tensor:
    """Megatron's layout: [sequence, batch, hidden], scattered along the first dimension."""
    return scatter(F.linear(x.transpose(0, 1), w).transpose(0, 1).contiguous(), 0)


# Of the function and the shapes of its inputs; the backward's gather is fused, too, where it is one.
FORMS: dict[str, tuple[Fn, Shapes]] = {
    "cast up": (from_bfloat16, ((2, 12, 8), (5, 8))),
    "saved": (saved, ((2, 12, 8), (5, 8))),
    "some of the heads": (heads_scattered, ((2, 4, 8), (8, 12))),
    "heads in front": (heads_moved, ((2, 12, 8), (8, 12))),
    "sequence first": (sequence_first, ((2, 12, 8), (5, 8))),
    "sum of two": (of_two, ((2, 12, 8), (2, 12, 8), (5, 8), (5, 8))),
    "sum of three": (of_three, ((2, 12, 8), (2, 12, 8), (5, 8), (5, 8))),
    "einsum": (lambda x, w: scatter(torch.einsum("bsk,kn->bsn", x, w), 1), ((2, 12, 8), (8, 5))),
    "einsum from heads": (
        lambda x, w: scatter(torch.einsum("bshd,hdk->bsk", x, w), 1),
        ((2, 12, 3, 4), (3, 4, 5)),
    ),
    "bmm of batch 1": (lambda x, w: scatter(torch.bmm(x, w[None]), 1), ((1, 12, 8), (8, 5))),
    "parts bound": (
        lambda x, w: scatter(torch.cat((x @ w).unflatten(1, (-1, 6)).unbind(1), 0), 0),
        ((2, 12, 8), (8, 5)),
    ),
    "last of 4-D": (lambda x, w: scatter(x @ w, 3), ((2, 2, 3, 8), (8, 12))),
}


@pytest.mark.parametrize(
    ("name", "world"),
    [(n, 2) for n in FORMS] + [(n, 3) for n in ("heads in front", "some of the heads", "cast up")],
)
def test_form(name: str, world: int) -> None:
    fn, shapes = FORMS[name]
    with fake_ranks(world):
        forward, backward = captured(fn, *(torch.randn(s, requires_grad=True) for s in shapes))
        assert forward.fused == [RS], forward.reasons
        assert set(backward.fused) == {AG}, backward.reasons
        for seen in (forward, backward):
            assert seen.count("_c10d_functional::wait_tensor") == 0
            check_same(seen, world)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", ["cast up", "heads in front", "sum of two", "sequence first", "einsum"])
def test_form_with_a_dynamic_size(name: str) -> None:
    fn, shapes = FORMS[name]
    inputs = [torch.randn(s, requires_grad=True) for s in shapes]
    for x in inputs:
        if x.shape[:2] == (2, 12):
            torch._dynamo.mark_dynamic(x, 1)
    for seen in captured(fn, *inputs, dynamic=True):
        assert set(seen.fused) <= {RS, AG}, seen.reasons
        assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in seen.before.nodes)
        check_same(seen, 2)


def qkv(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(gather(x, 1).bfloat16(), w.bfloat16()).float() for w in weights)


@pytest.mark.usefixtures("two")
def test_gradients_cast_one_by_one_are_one_sum() -> None:
    """Under autocast each of the three gradients is cast before they are added."""
    shapes = ((2, 6, 8), (5, 8), (7, 8), (3, 8))
    _, backward = captured(qkv, *(torch.randn(s, requires_grad=True) for s in shapes))
    assert set(backward.fused) == {RS}, backward.reasons
    check_same(backward, 2)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("count", "dtype", "copied"),
    [
        *((n, torch.bfloat16, False) for n in (2, 3, 4)),
        (2, torch.float16, False),
        *((n, torch.bfloat16, True) for n in (5, 7)),
        (2, torch.float32, True),
    ],
)
def test_factors_of_a_sum_are_copied_only_where_they_must_be(
    count: int, dtype: torch.dtype, copied: bool
) -> None:
    def summed(*tensors: Tensor) -> Tensor:
        return scatter(sum(x @ w for x, w in zip(tensors[:count], tensors[count:], strict=True)), 1)

    xs = [torch.randn(2, 12, 4 + i, dtype=dtype) for i in range(count)]
    ws = [torch.randn(4 + i, 6, dtype=dtype) for i in range(count)]
    (seen,) = captured(summed, *xs, *ws)
    assert seen.fused == [RS], seen.reasons
    assert seen.count("aten::cat") == 2 * copied
    (op,) = seen.after.find_nodes(
        op="call_function", target=torch.ops.weft.fused_matmul_reduce_scatter.default
    )
    assert len(op.kwargs.get("more", ())) == (0 if copied else 2 * (count - 1))
    check_same(seen, 2)


@pytest.mark.usefixtures("two")
def test_parts_in_any_order_that_is_known() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return (x.reshape(-1, 8) @ w).reshape(2, 6, 5)

    for fn in (
        lambda x, w: rs(torch.cat(product(x, w).split(1, 1))),
        lambda x, w: rs(torch.cat(product(x, w).split(3, 1), 2)),
        lambda x, w: rs(torch.cat(product(x, w).split(1, 2), 1).contiguous()),
    ):
        assert only(fn, (2, 6, 8), (8, 5)).fused == [RS]
    # Half of 5 columns is no number of columns.
    seen = only(lambda x, w: rs((x @ w).t().reshape(2, -1)), (6, 8), (8, 5))
    assert "cuts through" in seen.reasons


@pytest.mark.usefixtures("two")
def test_columns() -> None:
    assert only(lambda x, w: rs((x @ w).t().contiguous()), (6, 8), (8, 4)).fused == [RS]
    # 2 columns of each of 2 heads: not side by side.
    seen = only(lambda x, w: rs((x @ w).reshape(6, 2, 4).permute(2, 0, 1).contiguous()), (6, 8), (8, 8))
    assert "do not stand side by side" in seen.reasons


@pytest.mark.usefixtures("two")
def test_addmm() -> None:
    """Inductor folds a sum into addmm: a vector as bias, and a product as a full matrix."""

    def fold(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rs(torch.addmm(torch.addmm(b / 2, x, w), x.sin(), w))

    seen = only(fold, (6, 8), (8, 5), (5,))
    assert seen.fused == [RS]
    assert seen.entries[0].detail == "2 products, summed as one, 1 added vector"
    assert only(lambda x, w, b: rs(torch.addmm(b[None], x, w)), (6, 8), (8, 5), (5,)).fused == [RS]
    seen = only(lambda x, w, b: rs(torch.addmm(b, x, w)), (6, 8), (8, 5), (6, 5))
    assert "adds b_1 (placeholder), not a matrix product" in seen.reasons
    seen = only(lambda x, w, b: rs(torch.addmm(b, x, w, beta=2)), (6, 8), (8, 5), (5,))
    assert (seen.fused, seen.entries[0].detail) == ([RS], "1 product, 1 added vector")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.bfloat16, "twice as many bytes"),
        (torch.float16, torch.float32, None),
        (torch.float16, torch.bfloat16, "cast from torch.float16 to torch.bfloat16"),
        (torch.bfloat16, torch.float16, "cast from torch.bfloat16 to torch.float16"),
        (torch.float32, torch.float32, None),
    ],
    ids=str,
)
def test_casts(before: torch.dtype, after: torch.dtype, reason: str | None) -> None:
    seen = only(lambda x, w: rs((x.to(before) @ w.to(before)).to(after)), (6, 8), (8, 5))
    assert seen.fused == [None if reason else RS], seen.reasons
    assert (reason or "") in seen.reasons
    (op,) = [
        n for n in seen.after.nodes if n.target is torch.ops.weft.fused_matmul_reduce_scatter.default
    ] or [None]
    assert op is None or op.meta["val"].dtype == after, "the result is rounded"


@pytest.mark.usefixtures("two")
def test_a_sum_of_float16_products_stays_in_float32() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x, w = x.half(), w.half()
        return rs((x @ w).float() + (x @ w.sin()).float())

    assert "may be too large for torch.float16" in only(fn, (6, 8), (8, 5)).reasons


@pytest.mark.usefixtures("two")
def test_a_bias_is_summed_in_the_dtype_of_the_result() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rs(torch.addmm(b.bfloat16(), x.bfloat16(), w.bfloat16()).float())

    seen = only(fn, (6, 8), (8, 5), (5,))
    assert seen.fused == [RS]
    (summed,) = [n for n in seen.after.nodes if n.target is torch.ops.weft.one_shot_all_reduce.default]
    assert summed.meta["val"].dtype == torch.float32


@pytest.mark.usefixtures("two")
def test_a_bias_added_after_the_cast_is_left() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rs((x.bfloat16() @ w.bfloat16()).float() + b)

    assert "not added to the rows of the product" in only(fn, (6, 8), (8, 5), (5,)).reasons
    assert only(lambda x, w, b: rs(x @ w + b), (6, 8), (8, 5), (5,)).fused == [RS]


@pytest.mark.usefixtures("two")
def test_products_in_different_orders_are_left() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return rs(y + (x.sin() @ w).reshape(2, 4, 8).transpose(0, 1).reshape(8, 8))

    assert "have their rows or columns in different orders" in only(fn, (8, 8), (8, 8)).reasons


@pytest.mark.parametrize("rows", [2, 3])
def test_ranks_that_are_rows_and_columns_are_left(rows: int) -> None:
    """4 ranks as 2 x 2 blocks of the product."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        blocks = (x @ w).view(2, rows, 2, 5).permute(2, 0, 1, 3).reshape(4 * rows, 5)
        return rs(blocks)

    def gathered(x: Tensor, w: Tensor) -> Tensor:
        return ag(x).view(2, 2, rows, 5).permute(1, 2, 0, 3).reshape(2 * rows, 10) @ w.t()

    with fake_ranks(4):
        for each, shapes in ((fn, ((2 * rows, 8), (8, 10))), (gathered, ((rows, 5), (8, 10)))):
            check_left(each, "the ranks are no single dimension there", *shapes)
