"""What a mixture's experts add up to, and its reduction: forms that become one op, and others that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import AR, Ranks, Seen, applied, captured, check_same, traced
from graphs import scatter as rs
from test_layer_norm_forms import ar, by_hand
from test_norm_forms import hf_norm
from torch import Tensor
from weft.fused_ops.dispatch import profitability
from weft.fused_ops.dispatch.profitability import FusionCandidate, why_combined_before

SUM, NORM, SCATTER = (
    f"weft::fused_moe_combine_{name}" for name in ("all_reduce", "all_reduce_rms_norm", "reduce_scatter")
)
RMS, LAYER = "weft::fused_all_reduce_rms_norm", "weft::fused_all_reduce_layer_norm"
TOKENS, HIDDEN, EXPERTS = 6, 16, 5
Sum = Callable[..., Tensor]


class Combining(Ranks):
    """Runs these ops for all ranks, too. A list of integers that nothing was written to has none of a row."""

    def call(self, target: Any, args: list[Any]) -> list[Any]:
        name = getattr(target, "_opname", "")
        if target is torch.ops.aten.empty.memory_format and not args[0][1]["dtype"].is_floating_point:
            return [torch.full(a[0][0], -100, dtype=a[1]["dtype"]) for a in args]
        if not name.startswith("fused_moe_combine_"):
            return super().call(target, args)
        named = [{n: v for n, v in a[1].items() if n not in ("group_size", "shared")} for a in args]
        assert all(a[1]["group_size"] == self.world for a in args)
        total = self.reduced([combined(*a[0][:3], a[1].get("shared")) for a in args], "sum")
        if name.endswith("rms_norm"):
            return [self.rms_norm(total, a[0][2:], **n) for a, n in zip(args, named, strict=True)]
        if name.endswith("all_reduce"):
            return [total.clone() for _ in args]
        return [p.contiguous() for p in total.chunk(self.world, args[0][0][3])]


def combined(y: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    assert slots.dtype == torch.int32 and slots.min() >= 0 and slots.max() < len(y)
    total = torch.einsum("tk,tkh->th", weights, y[slots.long()])
    return total if shared is None else total + shared


pytestmark = pytest.mark.usefixtures("two")


def inputs(dtype: torch.dtype = torch.float32, wide: bool = False) -> list[Tensor]:
    """Tokens, scores, experts as one matrix, another one, residual and weight."""
    x, w, v = (torch.randn(s).to(dtype) for s in ((TOKENS, 8), (8, HIDDEN), (8, HIDDEN)))
    scores = torch.rand(TOKENS, EXPERTS)
    residual, weight = torch.randn(2, TOKENS // 2, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    return [x, scores if wide else scores.to(dtype), w, v, residual, weight]


def routed(scores: Tensor, choices: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, the order by experts, and its inverse, as transformers writes them."""
    top, ids = scores.topk(choices, -1)
    _, order = torch.sort(ids.reshape(-1))
    return top, order, inverse(order)


def inverse(order: Tensor, first: int = 0, of: Tensor | None = None) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(first, first + order.size(0)) if of is None else of
    return back


def rows(x: Tensor, order: Tensor, w: Tensor, choices: int = 2) -> Tensor:
    return torch.sin(x[order // choices] @ w)


def choices_summed(y: Tensor, back: Tensor, choices: int = 2) -> Tensor:
    return y[back].view(-1, choices, y.shape[-1]).sum(dim=1)


def transformers(x: Tensor, scores: Tensor, w: Tensor, choices: int = 2) -> Tensor:
    top, order, back = routed(scores, choices)
    y = rows(x, order, w, choices) * top.reshape(-1)[order].unsqueeze(-1)
    return choices_summed(y, back, choices).to(x.dtype)


def of_one(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    return transformers(x, scores, w, 1)


def of_three(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    return transformers(x, scores, w, 3)


def weighted_in_order(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    y = rows(x, order, w)[back].view(-1, 2, HIDDEN)
    return (top[..., None] * y).sum(-2).to(x.dtype)


def weighted_as_list(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    y = rows(x, order, w)[back] * top.reshape(-1, 1)
    return y.view(-1, 2, HIDDEN).sum(1).to(x.dtype)


def weights_of_rows(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    """Made of the sorted rows: none were taken in the order."""
    _, order, back = routed(scores)
    y = rows(x, order, w)
    return choices_summed(y * y.abs().amax(-1, keepdim=True), back)


def sorted_twice(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, _ = routed(scores)
    y = rows(x, order, w) * top.reshape(-1)[order].unsqueeze(-1)
    return choices_summed(y, order.argsort()).to(x.dtype)


def in_float32(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    y = rows(x, order, w).float() * top.reshape(-1)[order].unsqueeze(-1)
    return choices_summed(y, back).to(x.dtype)


def with_part(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    """Of a shared expert, added before the reduction."""
    return (x @ w.abs()).sin() + transformers(x, scores, w)


FORMS = (
    *(transformers, of_one, of_three, weighted_in_order, weighted_as_list, weights_of_rows),
    *(sorted_twice, in_float32, with_part),
)


def sent(fn: Sum, ending: str) -> Callable[..., Any]:
    """The function's result, reduced, and what follows it."""

    def program(x: Tensor, scores: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = fn(x, scores, w)
        if ending == "scatter":
            return rs(total) * 2
        total = ar(total).view(residual.shape)
        if ending == "sum":
            return total
        sums = residual + total if ending == "norm" else total
        return hf_norm(sums, weight), sums

    return program


def only(fn: Callable[..., Any], given: list[Tensor] | None = None, **named: Any) -> Seen:
    (seen,) = captured(fn, *(inputs() if given is None else given), **named)
    return seen


ENDINGS = ("sum", "norm", "norm alone", "scatter")
DTYPES = (
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.bfloat16, True),
)  # and whether scores are wide


@pytest.mark.parametrize(
    ("fn", "ending", "dtype", "wide"),
    [
        pytest.param(fn, ending, *DTYPES[(i + j) % 3], id=f"{fn.__name__}-{ending}")
        for i, fn in enumerate(FORMS)
        for j, ending in enumerate(ENDINGS)
    ],
)
def test_they_are_combined_by_what_reduces_them(fn: Sum, ending: str, dtype: torch.dtype, wide: bool) -> None:
    """Any two of a form, an ending and dtypes meet."""
    wide = wide and fn is not weights_of_rows  # which has no other weights
    seen = only(sent(fn, ending), inputs(dtype, wide))
    op = {"sum": SUM, "scatter": SCATTER}.get(ending, NORM)
    assert seen.fused == [op], seen.entries
    assert "experts → " in seen.entries[0].form
    count = {of_one: "1 choice of", of_three: "3 choices of"}.get(fn, "2 choices of")
    assert count in seen.entries[0].detail
    assert ("shared expert added" in seen.entries[0].detail) == (fn is with_part)
    left = seen.after.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert not left, seen.after
    check_same(seen, 2, Combining(2))


@pytest.mark.parametrize("ending", ["sum", "norm", "scatter"])
def test_of_any_number_of_tokens(ending: str) -> None:
    given = inputs()
    for each in (given[0], given[1]):
        torch._dynamo.mark_dynamic(each, 0)
    torch._dynamo.mark_dynamic(given[4], 1)
    seen = only(sent(transformers, ending), given, dynamic=True)
    assert seen.fused == [{"sum": SUM, "scatter": SCATTER}.get(ending, NORM)], seen.entries
    check_same(seen, 2, Combining(2))


def shared_expert(x: Tensor, scores: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """As DeepSeek-V3 has it, where each all-reduce is of its own module."""
    sums = residual + (ar(transformers(x, scores, w)).view(residual.shape) + ar((x @ v).view(residual.shape)))
    return hf_norm(sums, weight), sums


def two_shared_experts(
    x: Tensor, scores: Tensor, w: Tensor, v: Tensor, residual: Tensor, weight: Tensor
) -> Any:
    first = ar((x @ v).view(residual.shape)) + ar(transformers(x, scores, w)).view(residual.shape)
    return first + ar((x.relu() @ v).view(residual.shape))


def test_a_shared_expert_is_one_with_them() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        seen = only(shared_expert, inputs(dtype, wide=True))
        assert seen.fused == [NORM] * 2, seen.entries
        said = "2 choices of experts combined, shared expert added, 2 all-reduces as one, residual added, rms_norm"
        assert seen.entries[0].detail == said
        check_same(seen, 2, Combining(2))
    seen = only(two_shared_experts)
    assert seen.fused == [SUM] * 3, seen.entries
    check_same(seen, 2, Combining(2))


def test_what_is_kept_for_the_backward_is_there() -> None:
    given = [t.requires_grad_() for t in inputs()]
    forward, backward = captured(sent(transformers, "sum"), *given)
    assert (forward.fused, backward.fused) == ([SUM], [AR])
    check_same(forward, 2, Combining(2))


def weighted_after(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    return choices_summed(rows(x, order, w), back) * top.sum(-1, keepdim=True)


def weighted_by_columns(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    _, order, back = routed(scores)
    return choices_summed(rows(x, order, w) * w[:1], back)


def added_over_tokens(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    y = rows(x, order, w) * top.reshape(-1)[order].unsqueeze(-1)
    return y[back].view(2, -1, HIDDEN).sum(0)


def kept_dimension(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    y = rows(x, order, w) * top.reshape(-1)[order].unsqueeze(-1)
    return y[back].view(-1, 2, HIDDEN).sum(1, keepdim=True).view(-1, HIDDEN)


UNSEEN = (weighted_after, weighted_by_columns, added_over_tokens, kept_dimension)


@pytest.mark.parametrize("fn", UNSEEN, ids=lambda f: f.__name__)
def test_another_sum_is_only_reduced(fn: Sum) -> None:
    for ending, op in (("sum", AR), ("norm", RMS)):
        seen = only(sent(fn, ending))
        assert seen.fused == [op], seen.entries
        assert "experts" not in seen.entries[0].detail
        check_same(seen, 2, Combining(2))


def by(index: Callable[[Tensor, Tensor], Tensor]) -> Sum:
    """The same with another index, of the order and the scores."""

    def total(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
        top, order, _ = routed(scores)
        y = rows(x, order, w) * top.reshape(-1)[order].unsqueeze(-1)
        return choices_summed(y, index(order, scores))

    return total


def used_too(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, order, back = routed(scores)
    y = rows(x, order, w) * top.reshape(-1)[order].unsqueeze(-1)
    return choices_summed(y, back) + y[:TOKENS]


def rows_left_over(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    """More rows than the index takes."""
    top, order, back = routed(scores)
    y = torch.cat((rows(x, order, w) * top.reshape(-1)[order].unsqueeze(-1), x @ w))
    return choices_summed(y * y[:, :1], back)


NOT_SHOWN = "nothing shows that "
LEFT: dict[str, tuple[Sum, str]] = {
    "the order itself": (by(lambda order, scores: order), NOT_SHOWN),
    "counted from one": (by(lambda order, scores: inverse(order, 1) - 1), NOT_SHOWN),
    "from the end": (by(lambda order, scores: inverse(order) - order.size(0)), NOT_SHOWN),
    "other numbers": (by(lambda order, scores: inverse(order, of=order)), NOT_SHOWN),
    "any numbers": (by(lambda order, scores: (scores[:, :2].reshape(-1) * 3).long()), NOT_SHOWN),
    "of no order": (
        by(lambda order, scores: torch.zeros_like(order).index_put((order // 2,), torch.arange(len(order)))),
        NOT_SHOWN,
    ),
    "rows that are used": (used_too, "is used by "),
    "more rows": (rows_left_over, "does not take each row of "),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_looks_like_it_is_only_reduced(name: str) -> None:
    fn, why = LEFT[name]
    seen = only(sent(fn, "sum"))
    assert seen.fused == [AR], seen.entries
    assert seen.entries[0].detail.startswith("experts' outputs are combined before it: ")
    assert why in seen.entries[0].detail, seen.entries
    if name != "of no order":  # which is written more than once
        check_same(seen, 2, Combining(2))


def test_an_average_is_only_reduced() -> None:
    seen = only(lambda x, scores, w, *_: ar(transformers(x, scores, w), "avg"))
    assert seen.fused == [AR]
    check_same(seen, 2, Combining(2))


def test_a_layer_norm_of_them_is_not_of_the_op() -> None:
    seen = only(lambda x, scores, w, v, r, weight: by_hand(ar(transformers(x, scores, w)), weight))
    assert seen.fused == [LAYER]
    assert "no op has them and weft::fused_all_reduce_layer_norm" in seen.entries[0].detail
    check_same(seen, 2, Combining(2))


def test_other_rows_are_not_scattered_nor_normed() -> None:
    def joined(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
        return transformers(x, scores, w).view(2, -1)

    def normed(x: Tensor, scores: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        return hf_norm(ar(joined(x, scores, w)), torch.cat([rest[-1]] * 3))

    for fn, op in ((normed, RMS), (sent(joined, "scatter"), None)):
        seen = only(fn)
        assert seen.fused == [op], seen.entries
        assert "other rows than" in seen.entries[0].detail + seen.reasons
        check_same(seen, 2, Combining(2))


def written_between(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    top, ids = scores.topk(2, -1)
    order = ids.view(-1).sort()[1]
    y = rows(x, order, w)
    total = choices_summed(y * top.reshape(-1)[order].unsqueeze(-1), order.sort()[1])
    torch.ops.aten.neg_.default(y)
    return ar(total)


def test_rows_that_are_written_after_they_were_read_are_read_then() -> None:
    seen = applied(traced(written_between, *inputs()[:3]))
    assert seen.fused == [AR]
    assert "writes to memory" in seen.entries[0].detail
    check_same(seen, 2, Combining(2))


def test_on_gpus_what_no_kernel_puts_together_is_summed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profitability, "_current_gpu", lambda: None)

    def why(tokens: int, hidden: int, device: str = "cuda", norm: bool = False) -> str | None:
        on = FusionCandidate("all_reduce", tokens, hidden, 0, 2, torch.bfloat16, device)
        return why_combined_before(on, norm=norm)

    assert why(64, 2048) is None and why(64, 2048, norm=True) is None
    assert "no multiple of 16 bytes" in str(why(64, 2047))
    assert "beyond 2048 KiB" in str(why(513, 2048))
    assert "takes no rows of" in str(why(1, 1 << 17, norm=True))
    assert why(1, 1 << 17) is None
    assert why(513, 2047, "cpu", norm=True) is None
