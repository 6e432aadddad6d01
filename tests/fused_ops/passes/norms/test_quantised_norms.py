"""Norms after an all-reduce that become fp8, as vLLM and torchao spell it; near misses, and what the report says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AR, Seen, applied, captured, check_same, rounds_between_casts, traced
from scaled_graphs import E4M3, E5M2, by_scale, saturated, scale_of, times
from test_norm_forms import NORM, ar, gemma, hf_norm, vllm
from torch import Tensor
from torch_versions import SATURATING_CASTS
from weft.kernels.all_reduce_rms_norm.quant import QuantKind, quantize_rows

QUANT = "weft::fused_all_reduce_rms_norm_quant"
BF16 = torch.bfloat16
HIDDEN = 16
Fn = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("two")


def inputs(dtype: torch.dtype = BF16, shape: tuple[int, ...] = (2, 6, 8)) -> list[Tensor]:
    x, w, residual = (torch.randn(s).to(dtype) for s in (shape, (8, HIDDEN), (*shape[:-1], HIDDEN)))
    return [x, w, residual, torch.randn(HIDDEN).to(dtype), torch.rand(1) + 0.5]


def vllm_rows(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """QuantFP8.forward_native of vLLM, per token."""
    largest = torch.finfo(dtype).max
    maxima, _ = x.abs().max(dim=-1)
    scale = (maxima.unsqueeze(-1).to(torch.float32) / largest).clamp(min=1 / (largest * 512))
    return saturated(x.to(torch.float32) * scale.reciprocal(), dtype), scale


def vllm_static(x: Tensor, scale: Tensor) -> Tensor:
    return saturated(x.to(torch.float32) * scale.reciprocal())


def torchao_rows(x: Tensor, smallest: float | None = None) -> tuple[Tensor, Tensor]:
    """torchao's choose_scale_float8 and quantize_affine_float8, per row."""
    maxima = x.abs().amax(-1, keepdim=True)
    maxima = maxima if smallest is None else maxima.clamp(min=smallest)
    scale = (maxima / 448.0).to(torch.float32)
    return saturated(x.to(torch.float32) / scale), scale


def float8_linear(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """torchao's Float8Linear, row by row: the second is what products are multiplied by again."""
    scale = scale_of(x.abs().amax(-1, keepdim=True), dtype)
    return by_scale(x, scale, dtype), scale.reciprocal()


def flat(quantise: Fn) -> Fn:
    """Of the rows of a matrix, as products take it."""
    return lambda x, *given: quantise(x.reshape(-1, HIDDEN), *given)


def parts(x: Tensor, scale: Tensor) -> Tensor:
    """By one of several scales that lie together."""
    return vllm_static(x, torch.cat((scale, scale * 2))[1])


# What quantises the norm, and the op's arguments. Given a scale as its second argument where it takes one.
FORMS: dict[str, tuple[Fn, bool, dict[str, Any]]] = {
    "vLLM, per token": (vllm_rows, False, {"scale_op": "reciprocal", "smallest": 1 / (448.0 * 512)}),
    "vLLM, e5m2": (
        lambda x: vllm_rows(x, E5M2),
        False,
        {"scale_op": "reciprocal", "smallest": 1 / (57344.0 * 512), "out_dtype": E5M2},
    ),
    "vLLM, static": (vllm_static, True, {"scale_op": "reciprocal"}),
    "torchao, per row": (torchao_rows, False, {"scale_op": "divide", "smallest": 0.0}),
    "torchao, bounded": (lambda x: torchao_rows(x, 1e-5), False, {"scale_op": "divide", "smallest": 1e-5}),
    "torchao, static": (lambda x, s: saturated(x.float() / s), True, {"scale_op": "divide"}),
    "Float8Linear": (float8_linear, False, {"scale_op": "multiply", "smallest": 1e-12}),
    "multiplied, static": (by_scale, True, {"scale_op": "multiply"}),
    "rows of a matrix": (flat(vllm_rows), False, {"scale_op": "reciprocal", "smallest": 1 / (448.0 * 512)}),
    "a matrix, static": (flat(vllm_static), True, {"scale_op": "reciprocal"}),
    "a scale of several": (parts, True, {"scale_op": "reciprocal"}),
    "the scale on the left": (lambda x, s: saturated(s * x.float()), True, {"scale_op": "multiply"}),
}
NORMS: dict[str, Fn] = {
    "vLLM": vllm,
    "Gemma": gemma,
    "torch": lambda x, residual, weight: (F.rms_norm(y := residual + x, (HIDDEN,), weight, 1e-6), y),
    "no residual": lambda x, residual, weight: (hf_norm(x, weight), residual),
}


def of_norm(norm: Fn, quantise: Fn, given: bool) -> Fn:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        normed, sums = norm(ar(x @ w), residual, weight)
        return quantise(normed, scale) if given else quantise(normed), sums + 1

    return fn


def named(seen: Seen) -> dict[str, Any]:
    (op,) = seen.after.find_nodes(
        op="call_function", target=torch.ops.weft.fused_all_reduce_rms_norm_quant.default
    )
    quiet = ("group_size", "weight_offset", "round_sum", "scale")
    return {name: value for name, value in op.kwargs.items() if name not in quiet}


@pytest.mark.parametrize(
    ("name", "norm", "dtype"),  # each form of each norm, each form in each dtype, each norm in each dtype
    [
        (name, norm, (BF16, torch.float16, torch.float32)[(i + j) % 3])
        for i, name in enumerate(FORMS)
        for j, norm in enumerate(NORMS)
    ],
)
def test_fused(name: str, norm: str, dtype: torch.dtype) -> None:
    quantise, given, expected = FORMS[name]
    if given and norm in ("torch", "Gemma") and dtype != torch.float32 and not rounds_between_casts():
        pytest.skip("this torch quantises the norm in float32, which is another function")
    (seen,) = captured(of_norm(NORMS[norm], quantise, given), *inputs(dtype))
    assert seen.fused == [QUANT], seen.entries
    assert named(seen) == {"out_dtype": E4M3} | expected
    entry = seen.entries[0]
    assert entry.form.endswith(" → rms_norm → quant")
    kind = "float8_e5m2" if expected.get("out_dtype") == E5M2 else "float8_e4m3fn"
    assert entry.detail.endswith(f"in {kind} by {'a given scale' if given else 'a scale of each row'}"), (
        entry.detail
    )
    for gone in (torch.ops.aten.abs.default, torch.ops.aten.rsqrt.default, torch.ops.aten.clamp_max.default):
        assert not seen.after.find_nodes(op="call_function", target=gone)
    check_same(seen, 2)


def test_products_take_what_the_op_gives() -> None:
    """The reciprocal of what it multiplies by stays; scaled products are as they were."""

    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        q, s = float8_linear(hf_norm(residual + ar(x @ w), weight))
        return times(q, torch.ones(32, HIDDEN).to(E4M3), s, scale.expand(1, 32).contiguous())

    (seen,) = captured(fn, *inputs(shape=(16, 8)), runs=False)
    assert seen.fused == [QUANT], seen.entries
    (product,) = seen.after.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    assert product.args[0].args[1] == 0
    assert product.args[2].target is torch.ops.aten.reciprocal.default


def test_sizes_may_be_symbolic() -> None:
    for quantise, given in ((vllm_rows, False), (flat(vllm_rows), False), (vllm_static, True)):
        tensors = inputs()
        for t in (tensors[0], tensors[2]):
            torch._dynamo.mark_dynamic(t, 1)
        (seen,) = captured(of_norm(vllm, quantise, given), *tensors, dynamic=True)
        assert seen.fused == [QUANT], seen.entries
        check_same(seen, 2)


def norm_used_twice(x: Tensor, scale: Tensor) -> Any:
    return vllm_rows(x), x.sin()


def maximum_used(x: Tensor, scale: Tensor) -> Any:
    maxima = x.abs().amax(-1, keepdim=True)
    by = (maxima.float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), maxima


def positions_used(x: Tensor, scale: Tensor) -> Any:
    maxima, where = x.abs().max(-1, keepdim=True)
    by = (maxima.float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), where * 0.5


def whole(x: Tensor, scale: Tensor) -> Any:
    by = scale_of(torch.max(torch.abs(x)))
    return by_scale(x, by), by


def whole_by_amax(x: Tensor, scale: Tensor) -> Any:
    by = (x.abs().amax((0, 1, 2), keepdim=True).float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), by


def along_columns(x: Tensor, scale: Tensor) -> Any:
    by = (x.abs().amax(0, keepdim=True).float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), by


def power_of_two(x: Tensor, scale: Tensor) -> Any:
    by = scale_of(x.abs().amax(-1, keepdim=True), power_of_two=True)
    return by_scale(x, by), by


def another_bound(x: Tensor, scale: Tensor) -> Any:
    by = (x.abs().amax(-1, keepdim=True).float() / 240.0).clamp(min=1e-6)
    return (x.float() * by.reciprocal()).clamp(-240.0, 240.0).to(E4M3), by


def bounded_on_one_side(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Any:
    return (x.float() * scale.reciprocal()).clamp(max=torch.finfo(dtype).max).to(dtype)


def not_bounded(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Any:
    return (x.float() * scale.reciprocal()).to(dtype)


def another_bound_on_one_side(x: Tensor, scale: Tensor) -> Any:
    return (x.float() * scale.reciprocal()).clamp(max=240.0).to(E4M3)


def another_largest(x: Tensor, scale: Tensor) -> Any:
    by = (x.abs().amax(-1, keepdim=True).float() / 240.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), by


def divided_in_float32(x: Tensor, scale: Tensor) -> Any:
    """The scale is not rounded to the dtype of the rows, as it is where they are divided by it."""
    by = x.abs().amax(-1, keepdim=True).float() / 448.0
    return saturated(x.float() / by), by


def multiplied_in_float32(x: Tensor, scale: Tensor) -> Any:
    by = 448.0 / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return saturated(x.float() * by), by


def without_absolute_values(x: Tensor, scale: Tensor) -> Any:
    by = (x.amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), by


def maxima_of_something_else(x: Tensor, scale: Tensor) -> Any:
    by = (x.sin().abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), by


def in_16_bits(x: Tensor, scale: Tensor) -> Any:
    return saturated(x * scale.to(x.dtype))


def of_half_rows(x: Tensor, scale: Tensor) -> Any:
    halves = x.abs().reshape(*x.shape[:-1], 2, HIDDEN // 2).amax(-1)
    by = (halves[..., :1].float() / 448.0).clamp(min=1e-6)
    return saturated(x.float() * by.reciprocal()), by


def of_blocks(x: Tensor, scale: Tensor) -> Any:
    blocks = x.view(*x.shape[:-1], 2, HIDDEN // 2)
    by = (blocks.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
    return saturated(blocks.float() * by.reciprocal()), by


def by_columns(x: Tensor, scale: Tensor) -> Any:
    return vllm_static(x, scale.cos().expand(HIDDEN) * torch.arange(1, HIDDEN + 1))


def of_its_own_sum(x: Tensor, scale: Tensor) -> Any:
    return vllm_static(x, x.float().sum().reshape(1))


def plus_one(x: Tensor, scale: Tensor) -> Any:
    return saturated(x.float() * scale.reciprocal() + 1)


def two_casts(x: Tensor, scale: Tensor) -> Any:
    return vllm_static(x, scale), vllm_static(x, scale * 2)


# Near misses, whose norm alone is fused, and what the report says of what makes fp8 of it.
LEFT: dict[Fn, str] = {
    norm_used_twice: "is also used by sin",
    maximum_used: "is also used by the graph's output",
    positions_used: "is needed for more than its maxima",
    whole: "is no scale of each row",
    whole_by_amax: "is no scale of each row",
    along_columns: "is no scale of each row",
    power_of_two: "is not made in float64",
    another_bound: "does not bring it between -448 and 448",
    another_bound_on_one_side: "does not bring it between -448 and 448",
    another_largest: "does not divide a maximum by 448",
    divided_in_float32: "is not of the rows' dtype",
    multiplied_in_float32: "is not made in float64",
    without_absolute_values: "is not of the norm's absolute values",
    maxima_of_something_else: "is not of the norm's absolute values",
    in_16_bits: "does not apply a scale",
    of_half_rows: "is no maximum of each row",
    of_blocks: "is not of the norm in float32",
    by_columns: "is no scale of one element",
    of_its_own_sum: "is no scale of each row",
    plus_one: "does not apply a scale",
    two_casts: "it is cast to fp8 by",
}


@pytest.mark.parametrize("quantise", LEFT, ids=lambda f: f.__name__)
def test_near_misses_keep_what_makes_fp8(quantise: Fn) -> None:
    (seen,) = captured(of_norm(vllm, quantise, True), *inputs())
    assert seen.fused == [NORM], seen.entries
    detail = seen.entries[0].detail
    assert "what makes fp8 of it stays: " in detail and LEFT[quantise] in detail, detail
    check_same(seen, 2)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("quantise", [bounded_on_one_side, not_bounded], ids=lambda f: f.__name__)
def test_a_cast_that_saturates_is_a_bound(quantise: Fn, dtype: torch.dtype) -> None:
    (seen,) = captured(of_norm(vllm, lambda x, scale: quantise(x, scale, dtype), True), *inputs())
    saturates = dtype == E4M3 and SATURATING_CASTS
    assert seen.fused == [QUANT if saturates else NORM], seen.entries
    assert ("does not bring it between" in seen.entries[0].detail) is not saturates
    if quantise is not_bounded:
        check_same(seen, 2)
    if saturates:
        largest, x = (
            [448.0, -448.0],
            torch.tensor([torch.nan, torch.inf, -torch.inf, 449, 464, 1e6, -3e38, 3]),
        )
        scale = torch.ones(())
        bounded = quantize_rows(x, scale, QuantKind(dtype, "reciprocal"))[0]
        assert bounded.float()[1:3].tolist() == largest
        assert torch.equal(quantise(x, scale).view(torch.uint8), bounded.view(torch.uint8))


def test_a_layer_norm_keeps_it() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return vllm_static(F.layer_norm(residual + ar(x @ w), (HIDDEN,), weight, weight), scale)

    if not rounds_between_casts():
        pytest.skip("this torch quantises the norm in float32, which is another function")
    (seen,) = captured(fn, *inputs())
    assert seen.fused == ["weft::fused_all_reduce_layer_norm"]
    assert "what makes fp8 of it stays: no op makes fp8 of a LayerNorm" in seen.entries[0].detail
    check_same(seen, 2)


def test_a_scale_of_the_sum_itself_comes_too_late() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = residual + ar(x @ w)
        return vllm_static(hf_norm(y, weight), y[0, 0, :1].float()), y

    (seen,) = captured(fn, *inputs())
    assert seen.fused == [NORM]
    assert "its scale, is computed after the sum" in seen.entries[0].detail
    check_same(seen, 2)


def test_what_is_moved_to_another_device_stays() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        wide = hf_norm(residual + ar(x @ w), weight).float() * scale.reciprocal()
        return wide.clamp(-448.0, 448.0).to("meta", E4M3)

    seen = applied(traced(fn, *inputs()))
    assert seen.fused == [NORM], seen.entries
    assert "lies on meta" in seen.entries[0].detail


def written_between(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normed = hf_norm(residual + ar(x @ w), weight)
    scale.view(1).mul_(2)
    return vllm_static(normed, scale)


def test_a_scale_that_is_written_after_the_norm() -> None:
    seen = applied(traced(written_between, *inputs()))
    assert seen.fused == [NORM], seen.entries
    assert "writes to memory before it" in seen.entries[0].detail
    check_same(seen, 2)


def test_an_all_reduce_that_is_only_reduced_says_nothing_of_it() -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return vllm_static(ar(x @ w), scale)

    (seen,) = captured(fn, *inputs())
    assert (seen.fused, seen.entries[0].detail) == ([AR], "")
