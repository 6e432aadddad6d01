"""all_reduce of what is no matrix product, of products with a vector, and of several whose weights would be copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import AR, c10d, check_same, traced
from test_all_reduce_forms import MM_AR, W, X, ar, form, group, of_any_size, only
from torch import Tensor
from weft.fused_ops.dispatch.profitability import FusionCandidate
from weft.fused_ops.passes.graph.index_map import plain
from weft.fused_ops.passes.patterns.sum_of_matmuls import sum_of

__all__ = ["group", "of_any_size"]

OTHERS: dict[str, Callable[..., Tensor]] = {
    "an amax": lambda x, w: ar((x @ w).amax(-1)),
    "an embedding": lambda x, w: ar(torch.where(x > 0, x, torch.zeros_like(x))),
    "an expert's tokens": lambda x, w: ar((0 * x[:, :5]).index_add(0, torch.arange(6), x @ w)),
    "what was put at an index": lambda x, w: ar(
        torch.ops.aten.index_put.default(x, [torch.arange(3)], x[:3] @ w @ w.t())
    ),
    "joined products": lambda x, w: ar(torch.cat((x @ w, x.sin() @ w))),
    "rows of a product": lambda x, w: ar((x @ w)[:3]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_is_reduced_in_one_shot(name: str) -> None:
    seen = only(OTHERS[name], X, W)
    assert seen.fused == [AR], seen.reasons
    assert seen.entries[0].form == "all_reduce"
    check_same(seen, 2)


def a_loss(x: Tensor, w: Tensor) -> Tensor:
    return ar((x @ w).sum())


def waited_for_later(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The backend reduces beside the sine."""
    pending = c10d.all_reduce(x.abs(), "sum", "0")
    y = x.sin()
    return y, c10d.wait_tensor(pending)


def less_before_it_is_waited_for(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pending = c10d.all_reduce(x.abs(), "sum", "0")
    y = w[0].sin()
    return y, c10d.wait_tensor(pending).view(-1)


def test_what_runs_beside_it_may_be_too_little() -> None:
    seen = only(less_before_it_is_waited_for, X, W)
    assert seen.fused == [AR], seen.reasons
    check_same(seen, 2)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(a_loss, "its input is a number"), (waited_for_later, "waited for after sin (sin.default)")],
    ids=["a loss", "waited for later"],
)
def test_what_is_no_product_and_is_left_alone(fn: Callable[..., Any], reason: str) -> None:
    seen = only(fn, X, W)
    assert seen.fused == [None]
    assert reason in seen.reasons
    assert str(seen.after) == str(seen.before)


def test_too_many_bytes_that_are_no_product_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "why_not_profitable", lambda *args, **kwargs: "too large")
    seen = only(lambda x, w: ar(x.sin()), X, W)
    assert (seen.fused, seen.reasons) == ([None], "too large")


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_vector_that_each_rank_adds_is_reduced_by_itself(op: str, scale: int) -> None:
    seen = only(lambda x, w, b: ar(scale * torch.addmm(b, x, w), op), X, W, torch.randn(5))
    assert seen.fused == ["weft::" + MM_AR]
    assert "1 added vector" in seen.entries[0].detail
    assert seen.count(AR) == 1
    check_same(seen, 2)


@pytest.mark.usefixtures("of_any_size")
def test_a_matrix_that_is_added_is_only_reduced() -> None:
    seen = only(lambda x, w, b: ar(torch.addmm(b, x, w)), X, W, torch.randn(6, 5))
    assert seen.fused == [AR]
    check_same(seen, 2)


def test_the_report_tells_what_stays_after() -> None:
    bias = torch.randn(5)
    for fn, what in (
        (lambda x, w, b: ar(x @ w) + b, "add (add.Tensor) stays after it"),
        (lambda x, w, b: 0.5 * ar(x @ w)[None], "mul (mul.Tensor) stays after it"),
        (lambda x, w, b: ar(x @ w).sin(), ""),
    ):
        assert only(fn, X, W, bias).entries[0].detail == what


@pytest.mark.parametrize(("rows", "why"), [(128, "to copy its 2 weights"), (4096, None)])
def test_weights_are_not_copied_for_few_rows(rows: int, why: str | None) -> None:
    """Of LoRA, on GPUs: a product of 4096 x 4096, reduced over two ranks."""
    with torch.device("meta"):
        shapes = [
            torch.empty(s, dtype=torch.bfloat16) for s in ((rows, 4096), (4096, 4096), (rows, 8), (8, 4096))
        ]
    graph = traced(lambda x, w, y, v: ar(x @ w + 2 * (y @ v)), *shapes)
    (node,) = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    total = sum_of(node.args[0], plain((rows, 4096)), node)  # type: ignore[arg-type]
    on_gpu = FusionCandidate("matmul_all_reduce", rows, 4096, 4104, 2, torch.bfloat16, "cuda")
    found = form.why_not_joined(total, on_gpu)
    assert (found is None) == (why is None)
    assert why is None or why in str(found)
    assert form.why_not_joined(total, replace(on_gpu, device_type="cpu")) is None
