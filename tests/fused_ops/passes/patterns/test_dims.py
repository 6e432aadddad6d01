"""Digits of dimensions against the tensors themselves: where every element lies after random views."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from weft.fused_ops.passes.graph.index_map import (
    RANK,
    Digit,
    Dims,
    around_rank,
    flat_dims,
    gathered_dims,
    moved_dims,
    permuted,
    plain,
    refined,
    reshaped,
    same_size,
)
from weft.fused_ops.passes.graph.nodes import LeftAlone

WORLD = 2
SETTINGS = settings(max_examples=100, deadline=None)


def elements(dims: Dims, shape: list[int]) -> Tensor:
    """Which element of which shard lies where, as a number, read from the digits alone."""
    sizes = [math.prod(d.size for d in digits) for digits in dims]
    grids = torch.meshgrid(*(torch.arange(s) for s in sizes), indexing="ij")
    axes = [torch.zeros(sizes, dtype=torch.int64) for _ in (RANK, *shape)]
    for grid, digits in zip(grids, dims, strict=True):
        rest = grid
        for digit in reversed(digits):
            axes[digit.axis + 1] += rest % digit.size * digit.step
            rest = rest // digit.size
    number = axes[0]
    for axis, size in zip(axes[1:], shape, strict=True):
        number = number * size + axis
    return number


def factors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def shapes(draw: st.DrawFn, numel: int) -> list[int]:
    """A shape of that many elements."""
    shape = []
    while numel > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from(factors(numel))))
        numel //= shape[-1]
    return [*shape, numel]


@st.composite
def viewed(draw: st.DrawFn) -> tuple[Tensor, Dims, list[int]]:
    """Numbered elements after some views, what the digits say of them, and the shape of a shard."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    dims = gathered_dims(shape, WORLD)
    x = torch.arange(WORLD * math.prod(shape)).reshape(WORLD * shape[0], *shape[1:])
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["reshape", "permute", "parts"]))
        try:
            if kind == "reshape":
                target = draw(shapes(x.numel()))
                dims, x = reshaped(dims, target), x.reshape(target)
            elif kind == "permute":
                order = draw(st.permutations(range(x.dim())))
                dims, x = permuted(dims, order), x.permute(order)
            else:
                cut, join = (draw(st.integers(0, x.dim() - 1)) for _ in range(2))
                count = draw(st.sampled_from(factors(x.shape[cut])))
                dims, x = moved_dims(dims, count, cut, join), torch.cat(x.chunk(count, cut), join)
        except LeftAlone:
            continue
    return x, dims, shape


@SETTINGS
@given(viewed())
def test_digits_say_where_every_element_lies(case: tuple[Tensor, Dims, list[int]]) -> None:
    x, dims, shape = case
    assert torch.equal(elements(dims, shape).reshape(x.shape), x)


@SETTINGS
@given(viewed())
def test_one_order_is_made_from_another(case: tuple[Tensor, Dims, list[int]]) -> None:
    x, dims, shape = case
    want = gathered_dims(shape, WORLD)
    try:
        have, wanted = refined(flat_dims(dims), flat_dims(want))
    except LeftAlone:
        return
    order = [have.index(piece) for piece in wanted]
    back = x.reshape([p.size for p in have]).permute(order).reshape(-1)
    assert torch.equal(back, torch.arange(x.numel()))


@SETTINGS
@given(viewed())
def test_equal_digits_are_equal_tensors(case: tuple[Tensor, Dims, list[int]]) -> None:
    x, dims, shape = case
    if same_size(flat_dims(dims), flat_dims(gathered_dims(shape, WORLD))):
        assert torch.equal(x.reshape(-1), torch.arange(x.numel()))


def test_a_shape_that_cuts_through() -> None:
    with pytest.raises(LeftAlone, match="a shape of 3 x 4 cuts through"):
        reshaped(gathered_dims([3, 2], 2), [3, 4])
    with pytest.raises(LeftAlone, match="4 parts of 6 cut through"):
        moved_dims(gathered_dims([3, 2], 2), 4, 0, 1)


def test_ranks_that_are_split() -> None:
    with pytest.raises(LeftAlone, match="no single dimension"):
        around_rank((Digit(RANK, 2, 2), Digit(0, 3), Digit(RANK, 2, 1)), 4)
    with pytest.raises(LeftAlone, match="no single dimension"):
        around_rank((Digit(RANK, 2, 1), Digit(0, 3)), 4)
    assert around_rank(plain([3])[0], 4) is None


@pytest.fixture
def symbols() -> list[torch.SymInt]:
    """Two sizes of which nothing is known, as torch.compile has them."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    return [
        env.create_symintnode(
            env.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC),
            hint=hint,
            source=ConstantSource(name),
        )
        for name, hint in (("s", 6), ("t", 10))
    ]


def test_symbolic_sizes(symbols: list[torch.SymInt]) -> None:
    s, t = symbols
    dims = moved_dims(gathered_dims([4, s, t], 2), 2, 0, 1)
    rows = reshaped(dims, [8 * s, t])
    assert [len(d) for d in rows] == [3, 1]
    around = around_rank(rows[0], 2)
    assert around is not None
    assert same_size(around[0], plain([4])[0])
    assert same_size(around[1], (Digit(1, s),))
    # One size that is not known to fit is what is left; of two it is not known where the one ends.
    assert [len(d) for d in reshaped(dims, [4, t + 2, t])] == [1, 2, 1]
    with pytest.raises(LeftAlone, match="cuts through"):
        reshaped(dims, [t, s, 8])
