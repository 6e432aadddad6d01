"""RMSNorms after an all-reduce, as real models spell them; near misses, and what the report says of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AR, Seen, applied, captured, check_same, rounds_between_casts, traced
from spelled import reduced as ar
from torch import Tensor, fx

NORM = "weft::fused_all_reduce_rms_norm"
aten = torch.ops.aten
Fn = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("two")


def vllm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm.forward_native of vLLM."""
    dtype = x.dtype
    x = x.to(torch.float32) + residual.to(torch.float32)
    residual = x.to(dtype)
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    return x.to(dtype) * weight, residual


def vllm_promoting(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.float32) + residual
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * weight
    return normed.to(x.dtype), wide.to(x.dtype)


def vllm_gemma(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """GemmaRMSNorm.forward_native of vLLM."""
    dtype = x.dtype
    x = x.float() + residual.float()
    residual = x.to(dtype)
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    return (x * (1.0 + weight.float())).to(dtype), residual


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Hugging Face's."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).type_as(x)


def hf_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + x
    return gemma_norm(y, weight), y


def gemma_2(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """The norm stands between the all-reduce and the residual."""
    return residual + gemma_norm(x, weight)


def one_plus_in_16_bits(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return hf_norm(residual + x, 1 + weight)


def float32_weight(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + x
    return F.rms_norm(y, y.shape[-1:], weight, 1e-6), y


def rounded_at_once(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return hf_norm((x.float() + residual.float()).to(x.dtype), weight)


def alone(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The reduced tensor is used, too."""
    return hf_norm(x, weight), x.sin() + residual


# The function of the reduced tensor; whether its weight is float32; what the report says with 16 bits.
FORMS: dict[str, tuple[Fn, bool, str]] = {
    "vLLM": (vllm, False, "residual added, rms_norm of the unrounded sum"),
    "vLLM, promoting": (vllm_promoting, False, "residual added, rms_norm of the unrounded sum"),
    "vLLM, float32 weight": (vllm_promoting, True, "residual added, rms_norm of the unrounded sum"),
    "vLLM's Gemma": (
        vllm_gemma,
        False,
        "residual added, rms_norm of the unrounded sum, 1 added to the weight",
    ),
    "Gemma": (gemma, False, "residual added, rms_norm, 1 added to the weight"),
    "Gemma 2": (gemma_2, False, "rms_norm, 1 added to the weight"),
    "Gemma, float32 weight": (gemma, True, "residual added, rms_norm, 1 added to the weight"),
    "one plus in 16 bits": (one_plus_in_16_bits, False, "residual added, rms_norm, 1 added to the weight"),
    "float32 weight": (float32_weight, True, "residual added, rms_norm"),
    "rounded at once": (rounded_at_once, False, "residual added, rms_norm"),
    "no residual": (alone, False, "rms_norm"),
}


def inputs(dtype: torch.dtype, wide_weight: bool = False, grad: bool = False) -> list[Tensor]:
    x, w, residual = (torch.randn(s).to(dtype) for s in ((2, 6, 8), (8, 5), (2, 6, 5)))
    weight = torch.randn(5).to(torch.float32 if wide_weight else dtype)
    return [t.requires_grad_(grad) for t in (x, w, residual, weight)]


def of_product(norm: Fn) -> Fn:
    return lambda x, w, residual, weight: norm(ar(x @ w), residual, weight)


def named(graph: fx.Graph) -> dict[str, Any]:
    (op,) = graph.find_nodes(op="call_function", target=torch.ops.weft.fused_all_reduce_rms_norm.default)
    return {name: value for name, value in op.kwargs.items() if name != "group_size"}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMS)
def test_fused(name: str, dtype: torch.dtype) -> None:
    norm, wide, detail = FORMS[name]
    if name == "rounded at once" and not rounds_between_casts():
        detail += " of the unrounded sum"
    (seen,) = captured(of_product(norm), *inputs(dtype, wide))
    assert seen.fused == [NORM], seen.entries
    of_float32 = detail.replace(" of the unrounded sum", "")
    assert seen.entries[0].detail == (detail if dtype != torch.float32 else of_float32)
    assert not seen.after.find_nodes(op="call_function", target=aten.rsqrt.default)
    expected = {"weight_offset": 1.0} if "added to the weight" in detail else {}
    if dtype != torch.float32 and "unrounded" in detail:
        expected["round_sum"] = False
    assert named(seen.after) == expected
    check_same(seen, 2)


def test_of_what_is_no_product() -> None:
    """Of the outputs of experts, or of an embedding."""

    def embedded(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return gemma(ar(residual.cumsum(0)), residual, weight)

    (seen,) = captured(embedded, *inputs(torch.bfloat16))
    assert (seen.fused, seen.entries[0].form) == ([NORM], "all_reduce → add → rms_norm")
    check_same(seen, 2)


def test_sizes_may_be_symbolic() -> None:
    given = inputs(torch.bfloat16)
    for t in (given[0], given[2]):
        torch._dynamo.mark_dynamic(t, 1)
    (seen,) = captured(of_product(vllm), *given, dynamic=True)
    assert seen.fused == [NORM], seen.entries
    check_same(seen, 2)


def unrounded_sum_used(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float() + residual.float()
    return hf_norm(wide, weight.float()).to(x.dtype), wide.sin()


def result_in_float32(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return weight.float() * hf_norm(residual + x, weight)


def wide_result(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    wide = (residual + x).float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def float32_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return vllm(x, residual.float().sin(), weight)[0]


def residual_twice(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return hf_norm(torch.add(x, residual, alpha=2), weight)


def broadcast(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return hf_norm(x + residual[:1], weight)


def weight_of_the_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y = residual + x
    return hf_norm(y, weight * y[0, 0])


def matrix_of_weights(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return hf_norm(residual + x, residual)


def weight_first(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Its variance is that of what is multiplied by the weight already."""
    y = (residual + x).float() * weight
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def part_of_the_row(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y = (residual + x).float()
    return (y * torch.rsqrt(y[..., :3].pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def sum_and_norm_of_two_variances(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y = residual + x
    scale = torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y.float() * scale * weight * scale).to(x.dtype)


def weight_added(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y = residual + x
    return (weight + y.float() * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


# Near misses, which are only reduced, and what the report says of the norm; "" where it is seen to be none.
LEFT: dict[Fn, str] = {
    unrounded_sum_used: "the unrounded sum is also used by sin (sin.default)",
    wide_result: "its result is not torch.bfloat16",
    float32_residual: "sin (sin.default) is float32",
    residual_twice: "adds something else than a residual",
    broadcast: "adds what is not like what is reduced",
    weight_of_the_sum: "is computed after the sum",
    matrix_of_weights: "is no weight of its rows",
    weight_first: "",
    part_of_the_row: "",
    sum_and_norm_of_two_variances: "is used by",
    weight_added: "is another step than a norm has there",
}


@pytest.mark.parametrize("norm", LEFT, ids=lambda f: f.__name__)
def test_near_misses_are_only_reduced(norm: Fn) -> None:
    (seen,) = captured(of_product(norm), *inputs(torch.bfloat16))
    assert seen.fused == [AR], seen.entries
    assert LEFT[norm] in seen.entries[0].detail, seen.entries[0].detail
    assert ("the norm after it stays" in seen.entries[0].detail) == bool(LEFT[norm])
    check_same(seen, 2)


def test_what_follows_the_norm_is_no_part_of_it() -> None:
    (seen,) = captured(of_product(result_in_float32), *inputs(torch.bfloat16))
    assert seen.fused == [NORM]
    check_same(seen, 2)


def test_in_training_the_report_says_why_the_norm_stays() -> None:
    forward, _ = captured(of_product(gemma), *inputs(torch.bfloat16, grad=True))
    assert forward.fused == [AR]
    assert "the norm after it stays: " in forward.entries[0].detail
    check_same(forward, 2)


def only(fn: Fn, dtype: torch.dtype = torch.bfloat16) -> Seen:
    """The graph as it is written."""
    seen = applied(traced(fn, *inputs(dtype)))
    check_same(seen, 2)
    return seen


def test_a_sum_that_is_rounded_twice_is_in_two_places() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        normed, sums = vllm_promoting(y := ar(x @ w), residual, weight)
        wide = y.float() + residual
        return normed, sums, wide.to(x.dtype)

    def twice(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = ar(x @ w).float() + residual
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        return normed.to(x.dtype), wide.to(x.dtype), wide.to(x.dtype)

    assert only(twice).fused == [NORM]
    assert only(fn).fused == [AR]


def test_an_average_is_only_reduced() -> None:
    seen = only(lambda x, w, residual, weight: gemma(ar(x @ w, "avg"), residual, weight))
    assert (seen.fused, seen.entries[0].detail) == (
        [AR],
        "the norm after it stays: the collective reduces by 'avg'",
    )


def a_weight_that_is_written(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Between its cast, before the collective, and the norm."""
    wide = weight.to(torch.float32, copy=True)
    weight.mul_(2)
    y = residual + ar(x @ w)
    z = y.float()
    return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * wide).to(x.dtype)


def a_residual_that_is_written(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    wide = residual.to(torch.float32, copy=True)
    residual.mul_(2)
    return vllm(ar(x @ w), wide, weight)[0]


@pytest.mark.parametrize(
    "fn", [a_weight_that_is_written, a_residual_that_is_written], ids=lambda f: f.__name__
)
def test_what_was_cast_before_it_was_written(fn: Fn) -> None:
    seen = only(fn)
    assert seen.fused == [AR], seen.entries
    assert "writes to memory" in seen.entries[0].detail
