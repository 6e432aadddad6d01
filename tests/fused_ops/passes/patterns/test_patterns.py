"""What is fused: each way in which torch spells a gather before, or a scatter after, matrix products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, RS, captured, check_same, fake_ranks, gather, scatter
from spelled import ag, only, rs
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


def into_linear(dim: int) -> Callable[..., Tensor]:
    return lambda x, w, b=None: F.linear(gather(x, dim), w, b)


def into_mm(dim: int) -> Callable[..., Tensor]:
    return lambda x, w: gather(x, dim) @ w


def out_of_linear(dim: int, reduce_op: str = "sum") -> Callable[..., Tensor]:
    return lambda x, w, b=None: scatter(F.linear(x, w, b), dim, reduce_op)


def out_of_mm(dim: int) -> Callable[..., Tensor]:
    return lambda x, w: scatter(x @ w, dim)


def qkv(dim: int) -> Callable[..., tuple[Tensor, ...]]:
    def fn(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        y = gather(x, dim)
        return tuple(F.linear(y, w) for w in weights)

    return fn


def qkv_each(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(gather(x, 1), w) for w in weights)


def swiglu(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = gather(x, 1)
    return x + scatter(F.linear(F.silu(F.linear(y, a)) * F.linear(y, b), c), 1)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    y = gather(x, 1)
    heads = [F.linear(y, w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (q, k, v)]
    z = F.scaled_dot_product_attention(*heads, is_causal=True)
    return x + scatter(F.linear(z.transpose(1, 2).flatten(2), o), 1)


def moved_gather(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(gather(x.movedim(1, 0).contiguous(), 0).movedim(0, 1).contiguous(), w)


def moved_scatter(x: Tensor, w: Tensor) -> Tensor:
    return scatter(F.linear(x, w).movedim(1, 0).contiguous(), 0).movedim(0, 1)


# Each function with the shapes of its inputs, for 6 * 2 or 6 * 3 rows, and what its forward graph comes to.
CASES: dict[str, tuple[Callable[..., Any], Shapes, list[str]]] = {
    "mm, dim 0": (into_mm(0), ((6, 8), (8, 5)), [AG]),
    "linear, dim 0": (into_linear(0), ((6, 8), (5, 8)), [AG]),
    "linear with bias, dim 0": (into_linear(0), ((6, 8), (5, 8), (5,)), [AG]),
    "linear of 3-D, dim 0": (into_linear(0), ((6, 3, 8), (5, 8)), [AG]),
    "linear of 3-D, dim 1": (into_linear(1), ((2, 6, 8), (5, 8)), [AG]),
    "linear with bias of 3-D, dim 1": (into_linear(1), ((2, 6, 8), (5, 8), (5,)), [AG]),
    "linear of batch 1, dim 1": (into_linear(1), ((1, 6, 8), (5, 8)), [AG]),
    "linear of 4-D, dim 2": (into_linear(2), ((2, 3, 6, 8), (5, 8)), [AG]),
    "mm, last dim": (into_mm(1), ((4, 6), (12, 5)), [AG]),
    "q k v, dim 0": (qkv(0), ((6, 8), (5, 8), (7, 8), (3, 8)), [AG]),
    "q k v of 3-D, dim 0": (qkv(0), ((6, 2, 8), (5, 8), (7, 8), (3, 8)), [AG]),
    "q k v of 3-D, dim 1": (qkv(1), ((2, 6, 8), (5, 8), (7, 8), (3, 8)), [AG]),
    "mm then dim 0": (out_of_mm(0), ((12, 8), (8, 5)), [RS]),
    "linear of 3-D then dim 0": (out_of_linear(0), ((12, 3, 8), (5, 8)), [RS]),
    "linear of 3-D then dim 1": (out_of_linear(1), ((2, 12, 8), (5, 8)), [RS]),
    "linear of batch 1 then dim 1": (out_of_linear(1), ((1, 12, 8), (5, 8)), [RS]),
    "linear of 4-D then dim 2": (out_of_linear(2), ((2, 3, 12, 8), (5, 8)), [RS]),
    "mm then last dim": (out_of_mm(1), ((4, 8), (8, 12)), [RS]),
    "linear with bias then dim 1": (out_of_linear(1), ((2, 12, 8), (5, 8), (5,)), [RS]),
    "linear with bias of 2-D then dim 0": (out_of_linear(0), ((12, 8), (5, 8), (5,)), [RS]),
    "swiglu": (swiglu, ((2, 6, 8), (5, 8), (5, 8), (8, 5)), [AG, RS]),
    "swiglu of batch 1": (swiglu, ((1, 6, 8), (5, 8), (5, 8), (8, 5)), [AG, RS]),
    "attention": (attention, ((2, 6, 8), (16, 8), (16, 8), (16, 8), (8, 16)), [AG, RS]),
    "gather along dim 0, moved": (moved_gather, ((2, 6, 8), (5, 8)), [AG]),
    "scatter along dim 0, moved": (moved_scatter, ((2, 12, 8), (5, 8)), [RS]),
}
MIRROR = {AG: RS, RS: AG}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    # 4 rows of each of 3 ranks, where there are 6 of each of 2.
    with fake_ranks(request.param):
        yield request.param


def each_case(first: int) -> pytest.MarkDecorator:
    """Of 2 and of 3 ranks by turns."""
    cases = [(name, 2 + (first + i) % 2) for i, name in enumerate(CASES)]
    return pytest.mark.parametrize(("name", "world"), cases, indirect=["world"])


def inputs(shapes: Shapes, grad: bool) -> list[Tensor]:
    return [torch.randn(s, requires_grad=grad) for s in shapes]


def for_ranks(name: str, world: int) -> Shapes:
    """A shard of the last dimension is as wide as the weight is high, divided by the ranks."""
    shapes = CASES[name][1]
    return ((4, 12 // world), *shapes[1:]) if name == "mm, last dim" else shapes


@each_case(0)
def test_forward_and_backward_are_fused(name: str, world: int) -> None:
    fn, _, ops = CASES[name]
    forward, backward = captured(fn, *inputs(for_ranks(name, world), grad=True))
    assert forward.fused == ops, forward.reasons
    assert backward.fused == [MIRROR[op] for op in reversed(ops)], backward.reasons
    for seen in (forward, backward):
        assert seen.count("_c10d_functional::wait_tensor") == 0
        check_same(seen, world)


@each_case(1)
def test_without_gradients_nothing_is_gathered_in_vain(name: str, world: int) -> None:
    fn, _, ops = CASES[name]
    (seen,) = captured(fn, *inputs(for_ranks(name, world), grad=False))
    assert seen.fused == ops, seen.reasons
    for node in seen.after.nodes:
        if node.target is torch.ops.weft.fused_all_gather_matmul.default:
            assert node.kwargs["return_A"] is False
    check_same(seen, world)


@pytest.mark.parametrize("name", [n for n in CASES if n != "attention"])
def test_a_dynamic_size_stays_dynamic(name: str) -> None:
    fn, shapes, ops = CASES[name]
    with fake_ranks(2):
        tensors = inputs(shapes, grad=True)
        torch._dynamo.mark_dynamic(tensors[0], tensors[0].dim() - 2)
        forward, backward = captured(fn, *tensors, dynamic=True)
        assert forward.fused == ops, forward.reasons
        assert backward.fused == [MIRROR[op] for op in reversed(ops)], backward.reasons
        for seen in (forward, backward):
            symbols = [n for n in seen.after.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
            assert symbols, "the test is in vain: nothing is dynamic"
            check_same(seen, 2)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_products_of_one_gather_are_one_op_and_their_gradients_too(count: int) -> None:
    with fake_ranks(2):
        weights = [(5 + i, 8) for i in range(count)]
        forward, backward = captured(qkv(1), *inputs(((2, 6, 8), *weights), grad=True))
        assert forward.count(AG) == backward.count(RS) == 1
        assert forward.entries[0].detail == f"{count} products, A returned"
        assert backward.entries[0].detail == f"{count} products, summed as one"
        for seen in (forward, backward):
            check_same(seen, 2)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_a_tensor_gathered_for_each_product_is_gathered_once(grad: bool) -> None:
    with fake_ranks(2):
        graphs = captured(qkv_each, *inputs(((2, 6, 8), (5, 8), (7, 8), (3, 8)), grad))
        assert graphs[0].count(AG) == 1
        assert set(graphs[0].fused) == {AG}
        for seen in graphs:
            assert seen.count("_c10d_functional::wait_tensor") == 0
            check_same(seen, 2)


def test_a_tensor_gathered_along_two_dimensions_is_gathered_once() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(gather(x, 0), w), F.linear(gather(x, 1), w)

    with fake_ranks(2):
        (seen,) = captured(fn, *inputs(((2, 6, 8), (5, 8)), grad=False))
        assert [e.detail for e in seen.entries] == [
            "1 product, A returned",
            "merged with all_gather_into_tensor",
        ]
        check_same(seen, 2)


def a_flat_sum(x: Tensor, w: Tensor) -> Tensor:
    return rs((x @ w).reshape(-1) + (x.sin() @ w).reshape(-1))


def a_product_added_to_itself(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return rs(y + y)


def another_shape(x: Tensor, w: Tensor) -> Tensor:
    """4 x 32 x 16 from rows of 2 x 64: the parts are those of the flat result, whatever shapes stand between."""
    return rs((x.reshape(128, 8) @ w).reshape(4, 32, 16))


def a_bias_of_what_is_gathered(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = ag(x)
    first = y @ w
    return first, torch.addmm(first.sum(0) + y.sum(), y, w)


def a_weight_of_what_is_gathered(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = ag(x)
    first = y @ w
    return first, y @ (first.t() @ y).t()


def used(what: str) -> Callable[..., tuple[Tensor, ...]]:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        wait = ag(x)
        y = wait if what == "gathered" else torch.cat(wait.split(2), 1)
        rows = y.reshape(-1, 8)
        extra = {"gathered": y, "joined": y, "rows": rows, "transposed": rows.t()}[what]
        return rows @ w, extra, extra.sin()

    return fn


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("fn", "shapes", "detail"),
    [
        (lambda x, w, b: rs(torch.addmm(b, x, w)), ((12, 8), (8, 5), (5,)), "1 product, 1 added vector"),
        (a_flat_sum, ((6, 8), (8, 5)), "2 products, summed as one"),
        (a_product_added_to_itself, ((6, 8), (8, 5)), "2 products, summed as one"),
        (another_shape, ((2, 64, 8), (8, 16)), "1 product"),
        (a_bias_of_what_is_gathered, ((6, 8), (8, 5)), "2 products, A returned"),
        (a_weight_of_what_is_gathered, ((6, 8), (8, 5)), "1 product, A returned"),
        *(
            (used(what), ((2, 6, 8), (8, 5)), "A returned")
            for what in ("gathered", "joined", "rows", "transposed")
        ),
    ],
)
def test_what_is_said_of_them(fn: Callable[..., Any], shapes: Shapes, detail: str) -> None:
    (entry,) = only(fn, *shapes).entries
    assert entry.fused_into in (AG, RS), entry.reason
    assert detail in entry.detail


PERMUTATIONS = [p for p in itertools.permutations(range(3)) if p[0] != 0]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("kind", ["gathered", "gathered and used", "scattered"])
@pytest.mark.parametrize("permutation", PERMUTATIONS, ids=str)
def test_permuted(permutation: tuple[int, ...], kind: str) -> None:
    def gathered(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = ag(x).permute(permutation)
        out = y.reshape(-1, y.shape[-1]) @ w[: y.shape[-1]]
        return (out, y, y.sin()) if "used" in kind else (out,)

    def scattered(x: Tensor, w: Tensor) -> Tensor:
        return rs((x @ w).reshape(2, 4, 6).permute(permutation).contiguous())

    scatters = kind == "scattered"
    seen = only(scattered, (8, 5), (5, 6)) if scatters else only(gathered, (3, 4, 5), (20, 7))
    assert seen.fused == [RS if scatters else AG]
    # Of the matrix: rows, and the columns along which it is gathered; else what stands before, and the rows.
    assert seen.entries[0].dim == 1


def test_the_joined_tensor_serves_a_weight_gradient() -> None:
    """mm(gathered^T, g) is no product of the op, and no reason to leave the other one."""
    with fake_ranks(2):
        forward, backward = captured(out_of_linear(1), *inputs(((2, 12, 8), (5, 8)), grad=True))
        assert backward.entries[0].detail == "1 product, A returned"
        assert backward.count("aten::mm") == 1
        assert forward.count("aten::mm") == 0
