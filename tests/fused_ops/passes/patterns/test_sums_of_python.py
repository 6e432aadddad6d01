"""Python's ``sum``, which begins with the number 0, and other arithmetic that leaves every element as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, RS, captured, check_same, gather, scatter, traced
from spelled import Fn, Shape, additions, aten, only, rs, taken
from spelled import reduced as ar
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.graph.nodes import calls
from weft.fused_ops.passes.graph.views import unchanged

pytestmark = pytest.mark.usefixtures("two")
X, W = (12, 8), (8, 6)
MAR = "weft::fused_matmul_all_reduce"
TWO = (X, W, X, W)


def products(*given: Tensor) -> Any:
    return (x @ w for x, w in zip(given[::2], given[1::2], strict=True))


def always() -> FusionPass:
    return FusionPass(fuse="always", agree=False)


def cast(*given: Tensor) -> Tensor:
    return scatter(sum(y.float() for y in products(*(t.bfloat16() for t in given))))


# What becomes of the forward's collectives, and of how many products the first one is.
FORMS: dict[str, tuple[Fn, tuple[Shape, ...], list[str], int]] = {
    "one": (lambda *given: scatter(sum(products(*given))), (X, W), [RS], 1),
    "two": (lambda *given: scatter(sum(products(*given))), TWO, [RS], 2),
    "three": (lambda *given: scatter(sum(products(*given))), (*TWO, X, W), [RS], 3),
    "from a float on": (lambda *given: scatter(sum(products(*given), 0.0)), TWO, [RS], 2),
    "of sums": (lambda *given: scatter(sum([sum(products(*given)), given[0] @ given[3]])), TWO, [RS], 3),
    "cast": (cast, TWO, [RS], 2),
    "columns": (lambda *given: scatter(sum(products(*given)), 1), TWO, [RS], 2),
    "all-reduce": (lambda *given: ar(sum(products(*given))), TWO, [MAR], 2),
    "one all-reduce": (lambda *given: ar(sum(products(*given))), (X, W), [MAR], 1),
    "of all-reduces": (lambda *given: sum(map(ar, products(*given))), TWO, [MAR, MAR], 2),
    "of three all-reduces": (lambda *given: sum(map(ar, products(*given))), (*TWO, X, W), [MAR] * 3, 3),
    "of reduce-scatters": (lambda *given: sum(map(scatter, products(*given))), TWO, [RS, RS], 1),
    "once": (lambda x, w: scatter(1 * (x @ w)), (X, W), [RS], 1),
    "by one": (lambda x, w: scatter((x @ w) / 1.0), (X, W), [RS], 1),
    "less nothing": (lambda x, w: scatter(x @ w - 0), (X, W), [RS], 1),
    "no bit": (lambda x, w: scatter(x @ w + False), (X, W), [RS], 1),
    "gathered": (lambda x, w: sum([gather(x)]) @ w, (X, W), [AG], 1),
    "gathered and returned": (lambda x, w: ((y := sum([gather(x)])) @ w, y), (X, W), [AG], 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_fused(name: str, dtype: torch.dtype) -> None:
    fn, shapes, into, count = FORMS[name]
    (seen,) = captured(fn, *(torch.randn(s, dtype=dtype) for s in shapes), fusion=always())
    assert seen.fused == into, seen.reasons
    assert seen.entries[0].detail.startswith(f"{count} product")
    check_same(seen, 2)


@pytest.mark.parametrize("name", ["two", "columns", "of reduce-scatters", "gathered"])
def test_in_training(name: str) -> None:
    fn, shapes, into, _ = FORMS[name]
    seen = captured(fn, *(torch.randn(s, requires_grad=True) for s in shapes))
    assert seen[0].fused == into, seen[0].reasons
    for each in seen:
        assert all(each.fused), each.reasons
        check_same(each, 2)


ZEROS: dict[str, Callable[[Tensor], Tensor]] = {
    "on the right": lambda y: aten.add.Tensor(y, 0),
    "a float": lambda y: aten.add.Tensor(y, 0.0),
    "scaled by one": lambda y: aten.add.Tensor(y, 0, alpha=1),
    "of another overload": lambda y: aten.add.Scalar(y, 0),
    "twice": lambda y: aten.sub.Tensor(aten.mul.Scalar(y, 1), 0),
}


@pytest.mark.parametrize("name", ZEROS)
def test_before_a_reduce_scatter_and_after_it(name: str) -> None:
    """After it the op adds the residual, and nothing is left to add a 0."""
    seen = only(lambda x, w, r: ZEROS[name](rs(ZEROS[name](x @ w))).view(1, 6, 6) + r, X, W, (1, 6, 6))
    assert (seen.fused, taken(seen), additions(seen.after)) == ([RS], [{"residual"}], 0), seen.reasons
    assert seen.entries[0].form == "product → reduce_scatter → add"


def test_after_a_reduce_scatter_alone() -> None:
    seen = only(lambda x, w: aten.add.Tensor(rs(x @ w), 0), X, W)
    assert (seen.fused, additions(seen.after)) == ([RS], 1)


def test_all_reduces_in_another_order_than_their_sum() -> None:
    """The 0 is added to what is reduced last."""

    def summed(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Tensor:
        a, b = ar(x @ v), ar(y @ w)
        return sum([b, a])

    (seen,) = captured(summed, *(torch.randn(s) for s in TWO), fusion=always())
    assert (seen.fused, seen.count(MAR), additions(seen.after)) == ([MAR, MAR], 1, 0)
    check_same(seen, 2)


def test_summed_with_a_residual_and_normed() -> None:
    def normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = sum([ar(x @ w), residual])
        return F.rms_norm(y, (6,), weight, 1e-6), y

    shapes = (X, W, (12, 6), (6,))
    (seen,) = captured(normed, *(torch.randn(s) for s in shapes), fusion=FusionPass(agree=False))
    assert seen.fused == ["weft::fused_all_reduce_rms_norm"], seen.reasons
    assert additions(seen.after) == 0
    check_same(seen, 2)


# Twins that differ in one condition, and why they are left alone.
LEFT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another number": (lambda y: y + 1e-30, "adds 1e-30"),
    "by a tensor of one element": (lambda y: y * y[0, 0].sin(), "is mul"),
    "taken from 0": (lambda y: 0 - y, "adds 0"),
    "inverted": (lambda y: 1 / y, "is reciprocal"),
    "rounded": (lambda y: torch.div(y, 1, rounding_mode="floor"), "is div"),
    "scaled": (lambda y: torch.add(y, 0, alpha=2), "adds 0"),
    "nothing times infinity": (lambda y: torch.add(y, 0, alpha=float("inf")), "adds 0"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    fn, reason = LEFT[name]
    (seen,) = captured(lambda x, w: scatter(fn(x @ w)), torch.randn(X), torch.randn(W))
    assert seen.fused == [None]
    assert reason in seen.reasons, seen.reasons


def test_a_sum_that_others_use() -> None:
    (seen,) = captured(lambda x, w: (scatter(y := sum([x @ w])), y), torch.randn(X), torch.randn(W))
    assert seen.fused == [None]
    assert "is also used by" in seen.reasons


@pytest.mark.parametrize(
    ("fn", "same"),
    [
        (lambda x: aten.add.Tensor(x, 0), True),
        (lambda x: aten.add.Tensor(x, 0j), False),
        (lambda x: aten.div.Tensor(x, 1), True),
        (lambda x: aten.div.Tensor(x.int(), 1), False),
    ],
    ids=["0", "complex", "quotient", "of-integers"],
)
def test_a_number_of_another_dtype(fn: Callable[[Tensor], Tensor], same: bool) -> None:
    """A complex 0 changes the dtype, so it is no copy; nor is a quotient of integers."""
    (found,) = [n for n in traced(fn, torch.randn(X)).nodes if calls(n, aten.add.Tensor, aten.div.Tensor)]
    assert (unchanged(found) is not None) == same


def test_dtensors() -> None:
    """Summed as they are reduced. What is not reduced yet DTensor reduces itself, before it adds a number."""
    mesh = init_device_mesh("cpu", (2,))

    def summed(*given: Tensor) -> Tensor:
        xs = [DTensor.from_local(x, mesh, [Shard(1)]) for x in given[::2]]
        ws = [DTensor.from_local(w, mesh, [Shard(0)]) for w in given[1::2]]
        each = ((x @ w).redistribute(mesh, [Replicate()]) for x, w in zip(xs, ws, strict=True))
        return sum(each).to_local()

    (seen,) = captured(summed, *(torch.randn(s) for s in TWO), fusion=always())
    assert (seen.fused, seen.count(MAR)) == ([MAR, MAR], 1), seen.reasons
    check_same(seen, 2)
