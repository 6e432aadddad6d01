"""Gathers that are fused beyond the plain spellings of test_patterns.py: operands, casts, orders, other users.

Where a graph can be written in torch it is compiled, forward and backward; each has twins that differ in one condition.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, captured, check_same, fake_ranks, gather
from spelled import Fn, ag, check_left, gathering, only, reducing, wait
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


def as_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    """Autocast gathers before it casts."""
    return F.linear(gather(x, 1).bfloat16(), w.bfloat16())


def several_as_bfloat16(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = gather(x, 1)
    return F.linear(y.bfloat16(), a.bfloat16()), F.linear(y.bfloat16(), b.bfloat16())


def heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsk,hkd->bhsd", gather(x, 1), w)


def with_heads_in_front(x: Tensor, w: Tensor) -> Tensor:
    """[batch, heads, sequence, size] gathered along the sequence, then merged into rows."""
    y = gather(x, 2)
    return y.transpose(1, 2).flatten(2) @ w


def also_summed_and_indexed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = gather(x, 1)
    return F.linear(y, w), y.sum(-1), y[:, 3]


# Of the shard and weights: the function, the shapes, whether its backward's reduce_scatter is fused, too.
FORMS: dict[str, tuple[Fn, Shapes, bool]] = {
    "cast": (as_bfloat16, ((2, 6, 8), (5, 8)), True),
    "cast of batch 1": (as_bfloat16, ((1, 6, 8), (5, 8)), True),
    "cast for each of two products": (several_as_bfloat16, ((2, 6, 8), (5, 8), (7, 8)), True),
    "cloned before": (lambda x, w: F.linear(gather(x.clone(), 1), w), ((2, 6, 8), (5, 8)), True),
    "transposed before": (lambda x, w: gather(x.t(), 0) @ w, ((8, 6), (8, 5)), True),
    "bmm of batch 1": (lambda x, w: torch.bmm(gather(x, 1), w[None]), ((1, 6, 8), (8, 5)), True),
    "bmm with one matrix": (
        lambda x, w: torch.bmm(gather(x, 1), w.expand(2, *w.shape)),
        ((2, 6, 8), (8, 5)),
        False,
    ),
    "einsum": (lambda x, w: torch.einsum("bsk,kn->bsn", gather(x, 1), w), ((2, 6, 8), (8, 5)), True),
    "einsum into heads": (heads, ((2, 6, 8), (3, 8, 4)), True),
    "heads merged": (with_heads_in_front, ((2, 3, 6, 4), (12, 5)), True),
    "also summed and indexed": (also_summed_and_indexed, ((2, 6, 8), (5, 8)), False),
    "a weight": (lambda x, w: F.linear(x, gather(w, 0)), ((2, 6, 8), (5, 8)), True),
    "a weight gathered along its input": (lambda x, w: F.linear(x, gather(w, 1)), ((4, 24), (5, 24)), True),
    "a weight and its bias": (
        lambda x, w, b: F.linear(x, gather(w, 0), b.repeat(24 // 5 + 1)[: gather(w, 0).shape[0]]),
        ((4, 6), (4, 6), (5,)),
        False,
    ),
    "contracted": (lambda x, w: gather(x, 0).t() @ w, ((6, 8), (36, 5)), False),
    "contracted as right operand": (lambda x, w: w.t() @ gather(x, 0), ((6, 8), (36, 5)), False),
    "parts bound and joined": (
        lambda x, w: torch.cat(gather(x, 0).unflatten(0, (-1, 2)).unbind(0), 1) @ w,
        ((2, 6, 8), (8, 5)),
        False,
    ),
    "parts stacked": (
        lambda x, w: torch.stack(gather(x, 0).split(2), 1).flatten(1, 2) @ w,
        ((2, 6, 8), (8, 5)),
        False,
    ),
}


def for_world(name: str, world: int) -> Shapes:
    shapes = FORMS[name][1]
    if name == "a weight gathered along its input":
        return ((4, 24), (5, 24 // world))
    return (shapes[0], (6 * world, 5)) if name.startswith("contracted") else shapes


@pytest.mark.parametrize(
    ("name", "world"),
    [(n, 2) for n in FORMS] + [(n, 3) for n in ("cast", "heads merged", "a weight", "contracted")],
)
def test_form(name: str, world: int) -> None:
    fn, _, backward_too = FORMS[name]
    with fake_ranks(world):
        inputs = [torch.randn(s, requires_grad=True) for s in for_world(name, world)]
        forward, backward = captured(fn, *inputs)
        assert set(forward.fused) == {AG}, forward.reasons
        assert forward.count("_c10d_functional::wait_tensor") == 0
        assert all(backward.fused) or not backward_too, backward.reasons
        for each in (forward, backward):
            check_same(each, world)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    "name", ["cast for each of two products", "a weight", "contracted", "parts bound and joined"]
)
def test_form_without_gradients(name: str) -> None:
    (seen,) = captured(FORMS[name][0], *(torch.randn(s) for s in for_world(name, 2)))
    assert set(seen.fused) == {AG}, seen.reasons
    assert not any(e.detail.endswith("A returned") for e in seen.entries)
    check_same(seen, 2)


DYNAMIC = ["cast", "einsum", "heads merged", "also summed and indexed", "a weight", "parts stacked"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", DYNAMIC)
def test_form_with_a_dynamic_size(name: str) -> None:
    inputs = [torch.randn(s, requires_grad=True) for s in for_world(name, 2)]
    torch._dynamo.mark_dynamic(inputs[0], inputs[0].dim() - 2)
    for i, seen in enumerate(captured(FORMS[name][0], *inputs, dynamic=True)):
        assert i or set(seen.fused) == {AG}, seen.reasons
        assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in seen.before.nodes)
        check_same(seen, 2)


# Parts that are not one for each rank, or not cut where the shards meet, are reordered as they are.
JOINED: dict[str, Fn] = {
    "more parts than ranks": lambda x, w: torch.cat(ag(x).split(1), 1).reshape(-1, 8) @ w,
    "cut along another dimension": lambda x, w: torch.cat(ag(x).split(3, 1), 0).reshape(-1, 8) @ w,
    "rows of another length": lambda x, w: torch.cat(ag(x).split(2), 1).reshape(-1, 16) @ w.repeat(2, 1),
    "selected": lambda x, w: (
        torch.cat([y.select(0, 0) for y in [ag(x).unflatten(0, (2, 2))]] + [ag(x)[2:]], 1).reshape(-1, 8) @ w
    ),
}


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    "name", ["more parts than ranks", "cut along another dimension", "rows of another length"]
)
def test_parts_in_any_order_that_is_known(name: str) -> None:
    seen = only(JOINED[name], (2, 6, 8), (8, 5))
    assert seen.fused == [AG], seen.reasons


@pytest.mark.usefixtures("two")
def test_parts_of_two_spellings_are_left() -> None:
    assert set(only(JOINED["selected"], (2, 6, 8), (8, 5)).fused) == {None}


USERS: dict[str, Fn] = {
    "a shard": lambda y: y.split(2)[1].sin(),
    "the tensor before it is joined": lambda y: y.sin(),
    "its transpose": lambda y: y.transpose(0, 2),
    "a product of a shard": lambda y: y.split(2)[0] @ y.split(2)[0].transpose(1, 2),
}


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", USERS)
def test_other_users_get_it_in_the_order_they_had(name: str, before: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = ag(x)
        first = USERS[name](y) if before else None
        out = torch.cat(y.split(2), 1).reshape(-1, 8) @ w
        return out, USERS[name](y) if first is None else first

    seen = only(fn, (2, 6, 8), (8, 5))
    assert seen.fused == [AG], seen.reasons
    assert seen.entries[0].detail == "1 product, A returned"


@pytest.mark.usefixtures("two")
def test_right_and_left_operand_of_two_products() -> None:
    """In the same layout they are one op; else the rows are fused, the other product gets the gathered tensor."""
    seen = only(lambda x, w: (ag(x) @ w, w @ ag(x).t()), (4, 8), (8, 8))
    assert [e.detail for e in seen.entries] == ["2 products", "merged with all_gather_into_tensor"]
    seen = only(lambda x, w: (ag(x) @ w, ag(x).t() @ w), (4, 8), (8, 8))
    assert seen.entries[0].detail == "1 product, A returned"


@pytest.mark.usefixtures("two")
def test_what_a_product_adds_to_itself_comes_from_the_op() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return torch.addmm(y, y, w)

    seen = only(fn, (6, 8), (8, 8))
    assert seen.entries[0].detail == "1 product, A returned"
    assert seen.count("_c10d_functional::all_gather_into_tensor") == 0


@pytest.mark.usefixtures("two")
def test_gathered_again_for_something_else() -> None:
    seen = only(lambda x, w: (ag(x) @ w, ag(x), ag(x).sum()), (6, 8), (8, 5))
    assert seen.fused == [AG] * 3
    assert seen.count("_c10d_functional::all_gather_into_tensor") == 0
    # What was gathered twice lies in two places.
    assert any(n.target is torch.ops.aten.clone.default for n in seen.after.nodes)


def tensor_written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    out, view, joined = torch.cat(y.split(2), 1).reshape(-1, 8) @ w, y.view(-1, 8), torch.cat(y.split(2), 1)
    torch.ops.aten.add_.Tensor(y, 1)
    return out, view.sin(), joined, y @ w


def view_written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)
    view = y.transpose(0, 1)
    out = y.reshape(-1, 8) @ w
    torch.ops.aten.mul_.Tensor(view, 2)
    return out, y.sin(), torch.cat(y.split(2), 1)


def second_written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first, again = ag(x), ag(x)
    out, view = first.view(-1, 8) @ w, again.view(-1, 8)
    torch.ops.aten.add_.Tensor(again, 1)
    return out, view @ w, first


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("fn", [tensor_written, view_written, second_written], ids=lambda f: f.__name__)
def test_what_is_written_to_is_seen_by_its_views_only(fn: Fn) -> None:
    assert only(fn, (2, 6, 8), (8, 5)).fused[0] == AG


def cast_twice(x: Tensor, w: Tensor) -> Tensor:
    return ag(x).bfloat16().float() @ w


def cast_up(x: Tensor, w: Tensor) -> Tensor:
    return ag(x.bfloat16()).float() @ w


def cast_and_used(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = ag(x)
    return y.bfloat16() @ w.bfloat16(), y.sin()


def cast_after_scaling(x: Tensor, w: Tensor) -> Tensor:
    return (ag(x) * 2).bfloat16() @ w.bfloat16()


def cast_for_one_of_two(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As a router in float32 before experts in bfloat16, under autocast."""
    y = ag(x)
    return y.bfloat16() @ w.bfloat16(), y @ v


@pytest.mark.usefixtures("two")
def test_casts() -> None:
    assert only(cast_twice, (6, 8), (8, 5)).fused == [AG]
    assert "twice as many bytes" in only(cast_up, (6, 8), (8, 5)).reasons
    assert "before it is cast" in only(cast_and_used, (6, 8), (8, 5)).reasons
    assert only(cast_after_scaling, (6, 8), (8, 5)).entries[0].form == "all_gather → cast → factor → product"
    both = only(cast_for_one_of_two, (6, 8), (8, 5), (8, 3))
    assert both.fused == [AG] and both.entries[0].detail == "1 product, A returned"


@pytest.mark.usefixtures("two")
def test_an_operand_that_comes_too_late_leaves_the_product_of_another_layout() -> None:
    def fn(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = ag(x)
        return y @ ag(w), g.t() @ y

    seen = only(fn, (6, 8), (4, 5), (12, 3))
    assert (
        seen.fused == [AG, AG]
        and seen.entries[0].form == "all_gather of what is contracted → product as right operand"
    )


@pytest.mark.usefixtures("two")
def test_contracted_between_other_dimensions_is_left() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(ag(x).split(2), 1).reshape(-1, 8).t() @ w

    assert "not the outermost one" in only(fn, (2, 6, 8), (24, 5)).reasons
    assert only(fn, (1, 6, 8), (12, 5)).fused == [AG]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("operand", "reason"),
    [
        (lambda w: torch.bernoulli(w.sigmoid()), "which comes later"),
        (lambda w: [w := w.sin() for _ in range(80)][-1], "needs too much that comes later"),
        (lambda w: wait(reducing(w.sin(), "product")), "which comes later"),
    ],
    ids=["random", "long", "reduced"],
)
def test_an_operand_that_is_not_moved(operand: Fn, reason: str) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = ag(x)
        return y.sum(), y @ operand(w)

    check_left(fn, reason, (6, 8), (8, 5))
    assert only(lambda x, w: (ag(x).sum(), ag(x) @ w.sin()), (6, 8), (8, 5)).fused == [AG, AG]


@pytest.mark.usefixtures("two")
def test_the_order_of_collectives_stays() -> None:
    def fn(x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = gathering(x), reducing(z, "product")
        return wait(second), wait(first) @ w.sin()

    seen = only(fn, (6, 8), (3, 3), (8, 5))
    order = [n.name for n in seen.after.nodes if "gather" in n.name or n.name == "all_reduce"]
    assert order == ["fused_all_gather_matmul_default", "all_reduce"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_size_that_depends_on_data(dim: int) -> None:
    def fn(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
        rows = x[kept]
        return F.linear(gather(rows if dim == 0 else rows[None], dim), w)

    kept = torch.tensor([True, False, True, True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (seen,) = captured(fn, torch.randn(6, 8), torch.randn(5, 8), kept, dynamic=True)
    assert seen.fused == [AG], seen.reasons
