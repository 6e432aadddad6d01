"""all_reduce of what is no product, with a vector, of weights to be copied; near misses of those that are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import AR, c10d, traced
from spelled import ar, check_left, only, reducing, wait
from test_all_reduce_forms import AR_NORM, MM_AR, Norm, U, W, X, form, hf_norm, of_any_size
from torch import Tensor
from weft.fused_ops.dispatch.profitability import FusionCandidate
from weft.fused_ops.passes.graph.index_map import plain
from weft.fused_ops.passes.patterns.sum_of_matmuls import sum_of

__all__ = ["of_any_size"]
pytestmark = pytest.mark.usefixtures("two")

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


def a_loss(x: Tensor, w: Tensor) -> Tensor:
    return ar((x @ w).sum())


def waited_for_later(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The backend reduces beside the sine."""
    pending = reducing(x.abs())
    y = x.sin()
    return y, wait(pending)


def less_before_it_is_waited_for(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pending = reducing(x.abs())
    y = w[0].sin()
    return y, wait(pending).view(-1)


def test_what_runs_beside_it_may_be_too_little() -> None:
    seen = only(less_before_it_is_waited_for, X, W)
    assert seen.fused == [AR], seen.reasons


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(a_loss, "its input is a number"), (waited_for_later, "waited for after sin (sin.default)")],
    ids=["a loss", "waited for later"],
)
def test_what_is_no_product_and_is_left_alone(fn: Callable[..., Any], reason: str) -> None:
    check_left(fn, reason, X, W)


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_vector_that_each_rank_adds_is_reduced_by_itself(op: str, scale: int) -> None:
    seen = only(lambda x, w, b: ar(scale * torch.addmm(b, x, w), op), X, W, torch.randn(5))
    assert seen.fused == ["weft::" + MM_AR]
    assert "1 added vector" in seen.entries[0].detail
    assert seen.count(AR) == 1


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


R, G = torch.randn(6, 5), torch.randn(5)


def used_alone_before(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    y = ar(x @ u)
    return ar(x @ w) + y, y.sin()


def pending_before(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    pending = reducing(x @ u)
    return ar(x @ w) + wait(pending), pending


@pytest.mark.parametrize("fn", [used_alone_before, pending_before], ids=lambda f: f.__name__)
def test_one_that_was_left_and_is_used_alone_is_not_reduced_again(
    fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "why_not_profitable", lambda *args, **kwargs: "too large")
    assert set(only(lambda x, w, u: ar(x @ u) + ar(x @ w), X, W, U).fused) == {"_c10d_functional::all_reduce"}
    seen = only(fn, X, W, U)
    assert seen.fused == [None, None]
    assert [n.target for n in seen.after.nodes] == [n.target for n in seen.before.nodes]


def test_a_product_of_just_enough_bytes_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_least, op in ((6 * 5 * 4, "weft::" + MM_AR), (6 * 5 * 4 + 1, AR)):
        monkeypatch.setattr(form, "MATMUL_FROM", at_least)
        assert only(lambda x, w: ar(x @ w), X, W).fused == [op]


def layer_of(norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = residual + ar(x @ w)
        return norm(y, weight), y

    return fn


def pending_with_norm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    pending = reducing(x @ w)
    return hf_norm(residual + wait(pending), weight), pending


def another_strides(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual.reshape(5, 6).t() + ar(x @ w)
    return hf_norm(y, weight), y


def mean_in_float64(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + ar(x @ w)
    mean = y.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
    return weight * (y * torch.rsqrt(mean + 1e-6)).to(y.dtype), y


@pytest.mark.parametrize(
    "fn", [pending_with_norm, another_strides, mean_in_float64], ids=lambda f: f.__name__
)
def test_near_layers_are_only_reduced(fn: Callable[..., Any]) -> None:
    assert only(layer_of(hf_norm), X, W, R, G).fused == ["weft::" + AR_NORM]
    seen = only(fn, X, W, R, G)
    assert seen.fused == [AR]


def test_no_collective_of_the_group_is_overtaken_for_a_norm() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        pending = reducing(x @ w)
        other = ar(x.sin(), "product")
        y = residual + wait(pending)
        return hf_norm(y, weight), y, other

    seen = only(fn, X, W, R, G)
    assert seen.fused == [AR, None]
    names = [n.target._schema.name for n in seen.after.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert names.index(AR) < names.index("_c10d_functional::all_reduce")


def test_merged_numbers_are_no_collectives_left_as_they_were() -> None:
    """So that ranks vote on it: others may reduce each by itself."""
    seen = only(lambda x, y: ar(x.sum()) + ar(y.sum()), (6, 8), (6, 8))
    assert seen.count("_c10d_functional::all_reduce") == 1
    assert seen.fused == ["_c10d_functional::all_reduce"] * 2
    assert "its input is a number" in seen.entries[0].detail
