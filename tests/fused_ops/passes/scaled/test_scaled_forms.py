"""Factors, divisors and minuses between products and collectives: LoRA's scale, gradients that are averaged by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, RS, Seen, applied, captured, check_same, gather, scatter, traced
from spelled import reduced as ar
from torch import Tensor
from weft.fused_ops.passes import FusionPass

Fn = Callable[..., Any]
Shape = tuple[int, ...]
MAR = "weft::fused_matmul_all_reduce"
aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("two")


def always() -> FusionPass:
    return FusionPass(fuse="always", agree=False, collectives=False)


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A row-parallel layer with an adapter whose alpha is not its rank."""
    return scatter(x @ w + 0.25 * ((x @ a) @ b))


def lora_by_layers(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ar(F.linear(x, w.t()) + F.linear(F.linear(x, a.t()), b.t()) * 3)


X, W, A, B = (12, 8), (8, 6), (8, 2), (2, 6)
TWO = (X, W, X, W)
#: The shapes of inputs, by their names.
OPERANDS: dict[str, Shape] = {
    "x": X,
    "y": X,
    "w": W,
    "v": W,
    "a": A,
    "b": B,
    "s": (),
    "bias": (6,),
    "rows": (24, 6),
    "batch": (2, 3, 8),
    "long": (5, 16),
}
ONE, SUM = "1 product, multiplied by", "2 products, summed as one, multiplied by"
# The function, the op, and what the report says of it.
FORMS: dict[str, tuple[Fn, str, str]] = {
    "LoRA, scattered": (lora, RS, f"{SUM} 1, 0.25"),
    "LoRA, reduced": (lora_by_layers, MAR, f"{SUM} 3, 1"),
    "twice": (lambda x, w: scatter(2 * (x @ w)), RS, f"{ONE} 2"),
    "halved": (lambda x, w: scatter((x @ w) / 2), RS, f"{ONE} 0.5"),
    "a third, columns": (lambda x, w: scatter((x @ w) / 3, 1), RS, f"{ONE} 0.333333"),
    "minus": (lambda x, w: ar(-(x @ w)), MAR, f"{ONE} -1"),
    "minus twice": (lambda x, w: ar(-((x @ w) * -1)), MAR, "1 product"),
    "difference": (lambda x, w, y, v: scatter(x @ w - y @ v), RS, f"{SUM} 1, -1"),
    "a share of a difference": (
        lambda x, w, y, v: ar(0.5 * (x @ w) - (x @ w + y @ v) * 0.5),
        *(MAR, SUM.replace("2", "3") + " 0.5, -0.5"),
    ),
    "half of a sum": (lambda x, w, y, v: scatter(0.5 * (x @ w + y @ v)), RS, f"{SUM} 0.5"),
    "alpha of a difference": (
        lambda x, w, y, v: scatter(torch.sub(x @ w, y @ v, alpha=3)),
        *(RS, f"{SUM} 1, -3"),
    ),
    "addmm": (
        lambda x, w, y, v: scatter(torch.addmm(x @ w, y, v, beta=2, alpha=-0.5)),
        *(RS, f"{SUM} 2, -0.5"),
    ),
    "bias": (lambda x, w, bias: scatter(2 * (x @ w + bias)), RS, f"{ONE} 2, 1 added vector"),
    "bias alone": (
        lambda x, w, bias: scatter(torch.addmm(bias, x, w, beta=3)),
        *(RS, "1 product, 1 added vector"),
    ),
    "after a cast": (
        lambda x, w: scatter((x.bfloat16() @ w.bfloat16()).float() * 0.1, 1),
        *(RS, f"{ONE} 0.1"),
    ),
    "gathered": (lambda x, w: gather(x) * 1.5 @ w, AG, "1 product"),
    "gathered, along 1": (lambda batch, w: (gather(batch, 1) / 1.5) @ w, AG, "1 product"),
    "gathered, minus, cast": (lambda x, w: (-gather(x)).bfloat16() @ w.bfloat16(), AG, "1 product"),
    "gathered, returned": (lambda x, w: ((y := gather(x) * 2) @ w, y.sin()), AG, "1 product, A returned"),
    "gathered, addmm": (
        lambda x, w, rows: torch.addmm(rows, gather(x), w, beta=0.5, alpha=3),
        *(AG, "1 product"),
    ),
    "gathered weight": (lambda long, w: long @ (0.125 * gather(w)), AG, "1 product"),
}


def drawn(fn: Fn, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(OPERANDS[name], dtype=dtype) for name in inspect.signature(fn).parameters]


def only(fn: Fn, *shapes: Shape, dtype: torch.dtype = torch.float32) -> Seen:
    """The graph as it is written."""
    return applied(traced(fn, *(torch.randn(s, dtype=dtype) for s in shapes)), always())


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(FORMS)]
)
def test_fused(name: str, dtype: torch.dtype) -> None:
    fn, op, detail = FORMS[name]
    (seen,) = captured(fn, *drawn(fn, dtype), fusion=always())
    assert (seen.fused, seen.entries[0].detail) == ([op], detail), seen.reasons
    check_same(seen, 2)


def test_alpha_of_a_sum() -> None:
    """As it is written: torch 2.13's Inductor makes an addmm of it that has lost the alpha."""
    seen = only(lambda x, w, y, v: scatter(torch.add(x @ w, y @ v, alpha=3)), *TWO)
    assert seen.entries[0].detail == "2 products, summed as one, multiplied by 3, 1", seen.reasons
    check_same(seen, 2)


def of_columns(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = gather(x)
    return y @ w + 0.25 * ((y @ a) @ b)


@pytest.mark.parametrize(("fn", "forward", "backward"), [(lora, [RS], [AG]), (of_columns, [AG], [RS])])
def test_lora_in_training(fn: Fn, forward: list[str], backward: list[str]) -> None:
    """The adapter is trained, the layer is not."""
    inputs = [torch.randn(s).requires_grad_(s != W) for s in (X, W, A, B)]
    seen = captured(fn, *inputs, fusion=always())
    assert [s.fused for s in seen] == [forward, backward], [s.reasons for s in seen]
    for each in seen:
        check_same(each, 2)


@pytest.mark.parametrize("scale", [2, 0.5, -1.0])
def test_sizes_may_be_symbolic(scale: float) -> None:
    x, w, a, b = (torch.randn(s) for s in (X, W, A, B))
    torch._dynamo.mark_dynamic(x, 0)
    (seen,) = captured(lambda x, w, a, b: ar(x @ w + scale * (x @ a @ b)), x, w, a, b, dynamic=True)
    assert seen.fused != [None], seen.reasons
    check_same(seen, 2)


def test_the_smaller_operand_is_multiplied() -> None:
    for shapes, which in (((X, W, X, W), 1), (((4, 8), W, (4, 8), W), 0)):
        seen = only(lambda x, w, y, v: scatter(x @ w + 3 * (y @ v)), *shapes)
        (mul,) = seen.after.find_nodes(op="call_function", target=aten.mul.Tensor)
        inputs = seen.after.find_nodes(op="placeholder")
        assert mul.args == (inputs[2 + which], 3.0)
        check_same(seen, 2)


def test_one_factor_of_all_is_left_for_what_each_rank_gets() -> None:
    seen = only(lambda x, w, y, v: scatter(3 * (x @ w) + 3 * (y @ v)), *TWO)
    (mul,) = seen.after.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert tuple(mul.meta["val"].shape) == (6, 6)
    check_same(seen, 2)


def test_terms_after_a_factor_stay() -> None:
    seen = only(lambda x, w, r: scatter(2 * (x @ w)) + r, X, W, (6, 6))
    assert (seen.fused, "added" in seen.entries[0].detail) == ([RS], False)
    check_same(seen, 2)


# What is near to a factor: the function, and why it is left alone; in float16 what ends in it.
NO = "not a matrix product"
LEFT: dict[str, tuple[Fn, str]] = {
    "by zero": (lambda x, w: scatter(0 * (x @ w)), NO),
    "by infinity": (lambda x, w: scatter(float("inf") * (x @ w)), NO),
    "by a tensor": (lambda x, w, s: scatter(s * (x @ w)), NO),
    "rounded to whole numbers": (lambda x, w: scatter(torch.div(x @ w, 2, rounding_mode="floor")), NO),
    "a number less a product": (lambda x, w: scatter(1 - x @ w), ""),
    "added with alpha 0": (
        lambda x, w, y, v: scatter(torch.add(x @ w, y @ v, alpha=0)),
        "multiplies what it adds by 0",
    ),
    "half of float16": (lambda x, w: scatter((x @ w) / 2), "may be too large for torch.float16"),
    "LoRA of float16": (lora, "an operand may then be too large or too small"),
    "a huge share": (lambda x, w, y, v: scatter(x @ w + 1e9 * (y @ v)), "an operand may be out of range"),
    "used without its factor": (lambda x, w: (scatter(2 * (y := x @ w)), y), "is also used by"),
    "used with its factor": (lambda x, w: (scatter(y := 2 * (x @ w)), y), "is also used by"),
    "gathered, used without": (
        lambda x, w: (2 * (y := gather(x)) @ w, y.sum()),
        "before it is cast or multiplied",
    ),
    "gathered, addmm by 0": (
        lambda x, w, rows: torch.addmm(rows, gather(x), w, beta=0),
        "it scales by 1 and 0",
    ),
    "gathered, by a tensor": (lambda x, w, s: (s * gather(x)) @ w, "no matrix product"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    fn, reason = LEFT[name]
    given = drawn(fn, torch.float16 if name.endswith("float16") else torch.float32)
    seen = applied(traced(fn, *given), always())
    assert seen.fused == [None]
    assert reason in seen.reasons, seen.reasons
    assert str(seen.after) == str(seen.before)


@pytest.mark.parametrize("fn", [lambda x, w: scatter(2 * (x @ w)), lambda x, w: scatter(-(x @ w))])
def test_float16_that_stays_in_range(fn: Fn) -> None:
    seen = only(fn, X, W, dtype=torch.float16)
    assert seen.fused == [RS], seen.reasons
    check_same(seen, 2)
