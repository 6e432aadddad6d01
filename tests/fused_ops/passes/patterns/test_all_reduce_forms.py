"""all_reduce of matrix products: alone, several that feed one sum, with the norm after it; and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AR, Copied, Reduced, Seen, c10d, captured, check_same
from spelled import ar, check_left, only, reducing, wait
from torch import Tensor
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.patterns import all_reduce as form

MM_AR, AR_NORM = "fused_matmul_all_reduce", "fused_all_reduce_rms_norm"


pytestmark = pytest.mark.usefixtures("two")


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product is too small for its all-reduce to be hidden by it."""
    monkeypatch.setattr(form, "MATMUL_FROM", 0)


def swiglu(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Each column-parallel layer copies for itself, as in Hugging Face's plans."""
    h = F.silu(F.linear(Copied.apply(x), a)) * F.linear(Copied.apply(x), b)
    return x + Reduced.apply(F.linear(h, c))


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    heads = [F.linear(Copied.apply(x), w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (q, k, v)]
    z = F.scaled_dot_product_attention(*heads, is_causal=True)
    return x + Reduced.apply(F.linear(z.transpose(1, 2).flatten(2), o))


def cast(x: Tensor, w: Tensor) -> Tensor:
    """What autocast makes of a layer: a product in bfloat16 whose gradient is cast before it is reduced."""
    return F.linear(Copied.apply(x).bfloat16(), w.bfloat16()).float()


SWIGLU = ((2, 6, 8), (5, 8), (5, 8), (8, 5))
BLOCKS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, int]] = {
    "swiglu": (swiglu, SWIGLU, 1, 2),
    "swiglu of 2-D": (swiglu, ((6, 8), *SWIGLU[1:]), 1, 2),
    "swiglu of 4-D": (swiglu, ((2, 2, 3, 8), *SWIGLU[1:]), 1, 2),
    "attention": (attention, ((2, 6, 8), (16, 8), (16, 8), (16, 8), (8, 16)), 1, 3),
    "cast": (cast, ((2, 6, 8), (5, 8)), 0, 1),
}


def graphs(name: str, dynamic: bool = False) -> list[Seen]:
    fn, shapes, _, _ = BLOCKS[name]
    inputs = [torch.randn(s, requires_grad=True) for s in shapes]
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], inputs[0].dim() - 2)
    return captured(fn, *inputs, dynamic=dynamic)


def check_blocks(seen: list[Seen], name: str, op: str) -> None:
    """All fused, and those of the backward pass that feed one sum into one."""
    forward, backward = BLOCKS[name][2:]
    assert [len(s.entries) for s in seen] == [forward, backward]
    for s, number in zip(seen, (forward, backward), strict=True):
        assert all(into is not None and into.endswith(op) for into in s.fused), s.reasons
        assert sum(n.target.__name__.startswith(op) for n in s.after.nodes if n.op == "call_function") == min(
            number, 1
        )
        assert not any(n.target is c10d.wait_tensor.default for n in s.after.nodes)
        check_same(s, 2)


CASES = [(name, False) for name in BLOCKS] + [("swiglu", True), ("cast", True)]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_small_ones_are_reduced_in_one_shot(name: str, dynamic: bool) -> None:
    check_blocks(graphs(name, dynamic), name, "one_shot_all_reduce")


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_others_are_fused_into_the_product(name: str, dynamic: bool) -> None:
    # What is cast to float32 is to be reduced and returned in float32.
    op = "one_shot_all_reduce" if name == "cast" else MM_AR
    check_blocks(graphs(name, dynamic), name, op)


def test_always_fuses_whatever_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "why_not_profitable", lambda *args, **kwargs: "too large")

    def product(x: Tensor, w: Tensor) -> Tensor:
        return ar(x @ w)

    def with_norm(x: Tensor, w: Tensor) -> Tensor:
        weight = w[0]
        return hf_norm(x[:, :5] + ar((x @ w).sin()), weight)

    assert only(product, X, W).reasons == "too large"
    for fn, op in (
        (product, MM_AR),
        (lambda x, w: ar(x @ w) + ar((x + 1) @ w), MM_AR),
        (lambda x, w: ar(F.pad(x @ w, (0, 1)) + (x @ w)[:, :1]), "one_shot_all_reduce"),
        (lambda x, w: ar(torch.addmm(w[0], x, w)), MM_AR),
        (with_norm, AR_NORM),
    ):
        seen = only(fn, X, W, fusion=FusionPass(agree=False, fuse="always"))
        assert {e and e.partition("::")[2] for e in seen.fused} == {op}, seen.reasons


def test_the_report_tells_what_is_reduced() -> None:
    (entry,) = only(lambda x, w: ar(x @ w), X, W).entries
    assert (entry.m, entry.n, entry.k) == (6, 5, 0)
    assert str(entry).endswith("fused into weft::one_shot_all_reduce, 6 x 5  (product → all_reduce)")


@pytest.mark.parametrize("name", ["swiglu", "attention"])
def test_where_no_op_is_profitable_those_that_feed_one_sum_are_still_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "why_not_profitable", lambda *args, **kwargs: "too large")
    forward, backward = graphs(name)
    assert forward.fused == [None]
    assert forward.reasons == "too large"
    assert set(backward.fused) == {"_c10d_functional::all_reduce"}
    assert backward.count("_c10d_functional::all_reduce") == 1
    check_same(backward, 2)


@pytest.mark.parametrize("fuse", ["auto", "always"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float16_is_not_summed_before_it_is_reduced(dtype: torch.dtype, fuse: str) -> None:
    """40000 and 40000 on one rank, -40000 twice on the other: the sum of each rank's would be infinite."""
    seen = only(twice, *(t.to(dtype) for t in (X, W, U)), fusion=FusionPass(agree=False, fuse=fuse))
    assert None not in seen.fused
    assert any("as one" in e.detail for e in seen.entries) == (dtype != torch.float16)


X, W, U = torch.randn(6, 8), torch.randn(8, 5), torch.randn(8, 5)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("what", ["product", "norm", "sum", "number", "vector"])
def test_the_largest_and_the_smallest(what: str, op: str) -> None:
    """In one shot, whatever it is of: a product stays before it, a norm and another reduction after it."""
    programs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "product": lambda x, w: ar(x @ w, op),
        "norm": lambda x, w: torch.nn.functional.rms_norm(ar(x @ w, op), (w.shape[1],)),
        "sum": lambda x, w: ar(x @ w, op) + ar(x.sin() @ w, op),
        "number": lambda x, w: x / ar(x.abs().amax(), op) + w.sum(),
        "vector": lambda x, w: x / ar(x.abs().amax(1), op)[:, None] + w.sum(),
    }
    seen = only(programs[what], X, W)
    assert seen.fused == [AR] * (1 + (what == "sum"))
    assert all(e.form == f"all_reduce by {op}" for e in seen.entries)
    calls = [n.args[1] for n in seen.after.nodes if str(n.target) == "weft.one_shot_all_reduce.default"]
    assert calls == [op] * len(seen.fused)


def test_what_stays_of_the_largest_and_the_smallest() -> None:
    def beside(x: Tensor, w: Tensor) -> Tensor:
        pending = reducing(x.abs().amax(1), "max")
        y = x @ w
        return y * wait(pending)[:, None]

    for fn, reason, given in (
        (lambda x, w: ar(x @ w, "product"), "reduces by 'product'", X),
        (lambda x, w: ar(x.argmax(1), "max"), "its input is torch.int64", X),
        (lambda x, w: ar(x.amax(1), "max"), "its input is torch.float64", X.double()),
        (beside, "it reduces by 'max'; and it is waited for after", X),
    ):
        check_left(fn, reason, given, W.to(given.dtype))


def twice(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return ar(x @ w) + ar(x @ u)


def used_alone(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    y = ar(x @ w)
    return y + ar(x @ u), y.sin()


def scaled(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return torch.add(ar(x @ w), ar(x @ u), alpha=2)


def of_two_kinds(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return ar(x @ w) + ar(x @ u, "avg")


def of_two_shapes(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return ar(x @ w) + ar(x[:1] @ u)


def written_between(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    y = ar(x @ w)
    torch.ops.aten.mul_.Scalar(w, 2)
    return y + ar(x @ u)


@pytest.mark.parametrize(
    "fn", [used_alone, scaled, of_two_kinds, of_two_shapes, written_between], ids=lambda f: f.__name__
)
def test_sums_that_are_no_sum_of_all_reduces_only(fn: Callable[..., Any]) -> None:
    assert [e.detail for e in only(twice, X, W, U).entries] == [
        "2 all-reduces as one",
        "merged with all_reduce",
    ]
    seen = only(fn, X, W, U)
    assert not any("merged" in e.detail for e in seen.entries)


def a_sum_of_two_sums(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    first, second = ar(x @ w), ar(x @ u)
    third = ar(x.sin() @ u)
    return (third + x @ w.sin()) + (first + second)


def the_last_found_begins_between(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    first, third, second = ar(x @ w), ar(x.sin() @ u), ar(x @ u)
    return (third + x @ w.sin()) + (first + second)


@pytest.mark.parametrize("fn", [a_sum_of_two_sums, the_last_found_begins_between], ids=lambda f: f.__name__)
def test_each_of_those_merged_in_two_turns_is_said(fn: Callable[..., Any]) -> None:
    seen = only(fn, X, W, U)
    assert seen.count("_c10d_functional::all_reduce") == 0
    assert sorted(e.detail.split(" with")[0].split(",")[0] for e in seen.entries) == [
        "3 all-reduces as one",
        "merged",
        "merged",
    ], seen.reasons


def with_experts(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return ar(x @ w) + ar((x @ u).sin())


def test_a_product_and_something_else_are_reduced_as_one() -> None:
    """As a shared expert and experts."""
    seen = only(with_experts, X, W, U)
    assert sorted(e.detail.split(" with")[0] for e in seen.entries) == ["2 all-reduces as one", "merged"]


def pending_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pending = reducing(x @ w)
    return wait(pending).sin(), pending


def pending_returned_of_two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pending = reducing(x @ w)
    return wait(pending) + ar(x.sin() @ w), pending


@pytest.mark.parametrize("fn", [pending_returned, pending_returned_of_two], ids=lambda f: f.__name__)
def test_what_is_pending_is_returned_too(fn: Callable[..., Any]) -> None:
    seen = only(fn, X, W)
    assert set(seen.fused) == {AR}
    assert not any("merged" in e.detail for e in seen.entries)


@pytest.mark.usefixtures("of_any_size")
def test_a_product_that_is_used_elsewhere_is_only_reduced() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return ar(y), y.sin()

    assert only(lambda x, w: ar(x @ w), X, W).fused[0] != AR
    seen = only(fn, X, W)
    assert seen.fused == [AR]


def hf_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


Norm = Callable[[Tensor, Tensor], Tensor]
