"""fused_all_reduce_rms_norm_quant on real CPU processes: the bits of the norm and the steps after it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opcommon import (
    BOUND,
    DEVICES,
    DTYPES,
    assert_fused,
    cells,
    check,
    gather,
    poison,
    refuses,
    same_on_all,
    world,
)
from quantised import E4M3, E5M2, by_steps, same_bits
from ranks import on_ranks
from weft.fused_ops import fused_all_reduce_rms_norm, fused_all_reduce_rms_norm_quant
from weft.kernels.all_reduce_rms_norm.reference import rms_norm

EPS = 1e-5
SCALE_OPS = ("reciprocal", "divide", "multiply")
SHAPES = [(8,), (1, 8), (7, 24), (2, 3, 136), (5, 33), (66, 512)]
# Whether the weight is float32, whether there is a residual, and the norm's arguments.
KINDS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "usual": (False, True, {}),
    "vLLM": (False, True, {"round_sum": False}),
    "Gemma": (True, True, {"weight_offset": 1.0}),
    "no residual": (False, False, {}),
}


def smallest_of(scale_op: str, dtype: torch.dtype) -> float:
    return 1 / (512 * torch.finfo(dtype).max) if scale_op == "reciprocal" else 1e-12


@pytest.mark.parametrize(
    ("world_size", "device", "shape", "dtype"), cells([1, 2, 3, 4], [(shape,) for shape in SHAPES])
)
@on_ranks(None, device=None)
def test_the_bits_of_the_steps(
    rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    poison(rank)
    for i, (name, (wide, added, named)) in enumerate(KINDS.items()):
        x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if added else None
        weight = torch.randn(shape[-1]).to(torch.float32 if wide else dtype)
        given = x, residual, weight, EPS, world()
        normed, sums = fused_all_reduce_rms_norm(*given, **named)
        for scale_op in SCALE_OPS:
            out_dtype = (E4M3, E5M2)[(i + len(scale_op)) % 2]
            # By this one some numbers are too large.
            factor = 1000.0 if scale_op == "multiply" else 1e-3
            for scale in (None, torch.tensor([[factor]])):
                quant = {"scale": scale, "out_dtype": out_dtype, "scale_op": scale_op}
                quantized, scales, stored = fused_all_reduce_rms_norm_quant(*given, **named, **quant)
                if world_size > 1:
                    assert_fused()
                what = f"{name} {shape} {scale_op} {scale}"
                assert quantized.is_contiguous() and stored.is_contiguous(), what
                assert torch.equal(stored, sums), what
                want = by_steps(normed, scale, out_dtype, scale_op, smallest_of(scale_op, out_dtype))
                assert same_bits(quantized, want[0].view(shape)), what
                if scale is None:
                    assert scales.is_contiguous() and scales.shape == (*shape[:-1], 1)
                    assert same_bits(scales, want[1]), what
                    back = quantized.double() * (1 / scales if scale_op == "multiply" else scales).double()
                    of = sums if named.get("round_sum", True) else gathered_sum(x) + residual.double()  # type: ignore[union-attr]
                    norm = rms_norm(of.double(), weight.double(), EPS, named.get("weight_offset", 0.0))
                    # Half of a step of 2 or 3 bits, of each number alone.
                    check(what, back, norm, (2**-4 if out_dtype == E4M3 else 2**-3) + BOUND[dtype])
                else:
                    assert scales is scale


def gathered_sum(x: torch.Tensor) -> torch.Tensor:
    total: Any = sum(part.float() for part in gather(x))
    return total.to(x.dtype).double()


@on_ranks(2, device=DEVICES)
def test_zeros_and_what_is_no_number(rank: int, world_size: int) -> None:
    """Rows of zeros, with a NaN, with something infinite, and no row at all."""
    for dtype in DTYPES:
        x = torch.randn(4, 24).to(dtype)
        x[0] = 0
        x[1, 3], x[2, 5] = math.nan, -math.inf
        given = x, None, torch.ones(24, dtype=dtype), EPS, world()
        normed, _ = fused_all_reduce_rms_norm(*given)
        for scale_op in SCALE_OPS:
            for smallest in (None, 0.0, 2.0**-6):
                bound = smallest_of(scale_op, E4M3) if smallest is None else smallest
                quantized, scales, _ = fused_all_reduce_rms_norm_quant(
                    *given, scale_op=scale_op, smallest=smallest
                )
                want, want_scales = by_steps(normed, None, E4M3, scale_op, bound)
                what = f"{dtype} {scale_op} {smallest}"
                assert same_bits(quantized, want) and same_bits(scales, want_scales), what
                # In float16 the smallest maximum of torchao is 0.
                vanishes = bound == 0 or (
                    dtype == torch.float16 and scale_op == "divide" and smallest is None
                )
                assert bool(quantized[0].float().isnan().all()) == vanishes, what
                assert bool(quantized[1].float().isnan().all() and scales[1].isnan().all()), what
                assert bool(quantized[3].float().isfinite().all()), what
        none = fused_all_reduce_rms_norm_quant(x[:0], *given[1:])
        assert [t.shape for t in none] == [(0, 24), (0, 1), (0, 24)]
        by_one = fused_all_reduce_rms_norm_quant(x[:, :0], None, x[0, :0], EPS, world(), scale=torch.ones(()))
        assert by_one[0].shape == (4, 0)


@on_ranks(3, device=DEVICES)
def test_any_strides_and_alignment(rank: int, world_size: int) -> None:
    base, scales = torch.randn(9, 11, 16), torch.tensor([3.0, 0.25, 7.0])
    residual = same_on_all(9, 11, 16, dtype=torch.float32)
    odd = base.bfloat16().view(-1)[1:17]  # begins 2 bytes after an aligned address
    for x, r in [
        (base.transpose(0, 1), residual.transpose(0, 1)),
        (base[::2, 1:8:3], residual[::2, 1:8:3]),
        (odd, residual.bfloat16().view(-1)[3:19]),
    ]:
        given = x, r, torch.ones(16), 0.0, world()
        normed, sums = fused_all_reduce_rms_norm(*given)
        for scale in (None, scales[1], scales[1:2], scales[1:2].view(1, 1, 1)):
            quantized, found, stored = fused_all_reduce_rms_norm_quant(*given, scale=scale)
            want, want_scales = by_steps(
                normed,
                None if scale is None else scales[1],
                E4M3,
                "reciprocal",
                smallest_of("reciprocal", E4M3),
            )
            assert quantized.is_contiguous() and same_bits(quantized, want) and torch.equal(stored, sums)
            assert found is scale or same_bits(found, want_scales)


@on_ranks(1, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    op = torch.ops.weft.fused_all_reduce_rms_norm_quant
    x, weight, name, one = torch.randn(4, 8), torch.randn(8), world().group_name, torch.ones(1)
    for args, kind, words in [
        ((x.double(), x, weight, EPS, name), TypeError, "x: is torch.float64, must be float32"),
        ((x, x[:3], weight, EPS, name), ValueError, r"residual: has shape \(3, 8\), must have \(4, 8\)"),
        ((x, x, weight[:4], EPS, name), ValueError, r"weight: has shape \(4,\), must have \(8,\)"),
        ((x, x, weight, -1.0, name), ValueError, "eps: is -1.0, must be 0 or more"),
        ((x[:, :0], None, weight[:0], EPS, name), ValueError, "x: has rows of no element, must have some"),
        ((x, x, weight, EPS, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op, args, kind, words)
    for named, kind, words in [
        ({"out_dtype": torch.float16}, TypeError, "out_dtype: is torch.float16, must be torch.float8_e4m3fn"),
        ({"scale_op": "add"}, ValueError, "scale_op: is 'add', must be one of 'reciprocal', 'divide'"),
        ({"scale": one.double()}, TypeError, "scale: is torch.float64, must be torch.float32"),
        ({"scale": x[0]}, ValueError, r"scale: has shape \(8,\), must have one element"),
        ({"scale": one, "smallest": 0.5}, ValueError, "smallest: is 0.5, must be None where a scale"),
        ({"smallest": -1.0}, ValueError, "smallest: is -1.0, must be 0 or more, and finite in float32"),
        ({"smallest": math.nan}, ValueError, "smallest: is nan, must be 0 or more"),
        ({"weight_offset": math.inf}, ValueError, "weight_offset: is inf, must be finite"),
    ]:

        def call(*args: Any, names: tuple[str, ...] = tuple(named)) -> Any:
            return op(*args[:5], **dict(zip(names, args[5:], strict=True)))

        refuses(call, (x, x, weight, EPS, name, *named.values()), kind, words)
    for named, words in [
        ({"out_dtype": "float8_e4m3fn"}, "out_dtype: is of type str, must be torch.float8_e4m3fn or"),
        ({"scale_op": 1}, "scale_op: is of type int, must be one of 'reciprocal'"),
        ({"scale": 1.0}, "scale: is of type float, must be a tensor"),
        ({"smallest": "1"}, "smallest: is of type str, must be a number"),
        ({"round_sum": 1}, "round_sum: is of type int, must be True or False"),
        ({"weight_offset": "1"}, "weight_offset: is of type str, must be a number"),
    ]:
        with pytest.raises(TypeError, match=words):
            fused_all_reduce_rms_norm_quant(x, x, weight, EPS, name, **named)
    for wants in ("x", "residual", "weight", "scale"):
        given = {"x": x, "residual": x + 1, "weight": weight, "scale": one}
        given[wants] = given[wants].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"{wants}: requires a gradient, must not: a norm in fp8"):
            fused_all_reduce_rms_norm_quant(eps=EPS, group=name, **given)
    with torch.no_grad():
        fused_all_reduce_rms_norm_quant(x.clone().requires_grad_(), x, weight, EPS, name)
