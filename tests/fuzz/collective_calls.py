"""Arguments that fit the collectives without a product."""

from __future__ import annotations

from typing import Any

import values as v
from hypothesis import strategies as st

RANKS = 2


@st.composite
def all_reduce(draw: st.DrawFn) -> list[Any]:
    shape = tuple(draw(st.lists(v.sizes, max_size=4)))
    x = v.Tensor(shape, draw(v.dtypes), draw(v.layouts), draw(v.seeds))
    return [x, draw(st.sampled_from(("sum", "avg"))), draw(v.groups)]


@st.composite
def all_gather(draw: st.DrawFn) -> list[Any]:
    shape = draw(st.lists(v.sizes, min_size=1, max_size=4))
    dim, dtype = draw(st.integers(0, len(shape) - 1)), draw(v.dtypes)
    x = v.Tensor(tuple(shape), dtype, draw(v.layouts), draw(v.seeds))
    counts = draw(st.sampled_from((None, [shape[dim]] * RANKS)))
    shape[dim] *= RANKS
    dim -= draw(st.sampled_from((0, len(shape))))
    return [x, dim, draw(v.groups), draw(_outs(shape, dtype)), counts]


@st.composite
def reduce_scatter(draw: st.DrawFn) -> list[Any]:
    shape = draw(st.lists(v.sizes, min_size=1, max_size=4))
    dim, dtype = draw(st.integers(0, len(shape) - 1)), draw(v.dtypes)
    out = draw(_outs(shape, dtype))
    shape[dim] *= RANKS
    x = v.Tensor(tuple(shape), dtype, draw(v.layouts), draw(v.seeds))
    counts = None
    if out is None and draw(st.booleans()):
        first = draw(st.integers(0, shape[dim]))
        counts = [first, shape[dim] - first]
    dim -= draw(st.sampled_from((0, len(shape))))
    return [x, draw(st.sampled_from(("sum", "avg"))), dim, draw(v.groups), out, counts]


@st.composite
def all_to_all(draw: st.DrawFn) -> list[Any]:
    shape = draw(st.lists(v.sizes, min_size=1, max_size=4))
    scatter_dim, gather_dim = (draw(st.integers(-len(shape), len(shape) - 1)) for _ in range(2))
    shape[scatter_dim] *= RANKS
    x = v.Tensor(tuple(shape), draw(v.dtypes), draw(v.layouts), draw(v.seeds))
    return [x, scatter_dim, gather_dim, draw(v.groups)]


@st.composite
def gather(draw: st.DrawFn) -> list[Any]:
    x, dim, group, _, counts = draw(all_gather())
    return [x, dim, draw(st.integers(0, RANKS - 1)), group, counts]


@st.composite
def matmul_all_to_all(draw: st.DrawFn) -> list[Any]:
    lead = draw(st.lists(v.sizes, min_size=1, max_size=3))
    dim, k, dtype = draw(st.integers(0, len(lead) - 1)), draw(v.sizes), draw(v.dtypes)
    A = v.Tensor((*lead, k), dtype, draw(v.layouts), draw(v.seeds))
    B = v.Tensor((k, RANKS * draw(v.sizes)), dtype, draw(v.layouts), draw(v.seeds))
    return [A, B, dim - draw(st.sampled_from((0, len(lead) + 1))), draw(v.groups)]


@st.composite
def matmul_all_gather(draw: st.DrawFn) -> list[Any]:
    A, B, _, group = draw(matmul_all_to_all())
    return [A, B, group]


@st.composite
def all_to_all_matmul(draw: st.DrawFn) -> list[Any]:
    lead = draw(st.lists(v.sizes, min_size=1, max_size=3))
    dim, k, dtype = draw(st.integers(0, len(lead) - 1)), draw(v.sizes), draw(v.dtypes)
    lead[dim] *= RANKS
    A = v.Tensor((*lead, k), dtype, draw(v.layouts), draw(v.seeds))
    B = v.Tensor((RANKS * k, draw(v.sizes)), dtype, draw(v.layouts), draw(v.seeds))
    return [A, B, dim - draw(st.sampled_from((0, len(lead) + 1))), draw(v.groups)]


def _outs(shape: list[int], dtype: str) -> st.SearchStrategy[Any]:
    """None, or a tensor for the result."""
    sizes = tuple(shape)
    return st.one_of(st.none(), st.builds(v.Tensor, st.just(sizes), st.just(dtype), v.layouts, v.seeds))
