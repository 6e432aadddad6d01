"""fused_all_reduce_rms_norm with another weight, sum or without a residual, on real CPU processes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcommon import BOUND, DEVICES, DTYPES, assert_fused, check, gather, poison, refuses, world
from ranks import on_ranks
from weft.fused_ops import fused_all_reduce_rms_norm, one_shot_all_reduce
from weft.kernels.all_reduce_rms_norm.reference import rms_norm

EPS = 1e-5
# Whether the weight is float32, whether there is a residual, and the arguments.
KINDS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "unrounded": (False, True, {"round_sum": False}),
    "Gemma": (False, True, {"weight_offset": 1.0}),
    "float32 weight": (True, True, {}),
    "all of it": (True, True, {"round_sum": False, "weight_offset": 0.5}),
    "no residual": (False, False, {}),
    "no residual, Gemma": (True, False, {"weight_offset": 1.0}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks([1, 2, 3], device=DEVICES)
def test_values(rank: int, world_size: int, dtype: torch.dtype) -> None:
    poison(rank)
    for name, (wide, added, named) in KINDS.items():
        for shape in [(8,), (2, 3, 136), (0, 8), (5, 33), (66, 512)]:
            x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if added else None
            weight = torch.randn(shape[-1]).to(torch.float32 if wide else dtype)
            total = one_shot_all_reduce(x, "sum", world())
            normed, sums = fused_all_reduce_rms_norm(x, residual, weight, EPS, world(), **named)
            if x.numel() and world_size > 1:
                assert_fused()
            assert normed.is_contiguous() and sums.is_contiguous() and normed.dtype == sums.dtype == dtype
            assert torch.equal(sums, total if residual is None else total + residual), f"sums {name}"
            of = sums.double()
            if residual is not None and not named.get("round_sum", True):
                of = total.double() + residual.double()
            want = rms_norm(of, weight.double(), EPS, named.get("weight_offset", 0.0))
            check(f"{name} {shape}", normed, want, BOUND[dtype])


@on_ranks(2, device=DEVICES)
def test_the_unrounded_sum_is_normed(rank: int, world_size: int) -> None:
    """256 + 1 is rounded to 256: what stands beside it in the row tells which of both was normed."""
    x = torch.tensor([[256.0, 3.0]]).bfloat16() * (rank == 0)
    residual, weight = torch.tensor([[1.0, 0.0]]).bfloat16(), torch.ones(2).bfloat16()
    rounded, _ = fused_all_reduce_rms_norm(x, residual, weight, 0.0, world())
    exact, sums = fused_all_reduce_rms_norm(x, residual, weight, 0.0, world(), round_sum=False)
    assert sums.tolist() == [[256.0, 3.0]]
    for normed, row in ((rounded, [256.0, 3.0]), (exact, [257.0, 3.0])):
        want = rms_norm(torch.tensor([row], dtype=torch.float64), torch.ones(2), 0.0)
        assert torch.equal(normed, want.bfloat16()), row
    assert rounded[0, 1] != exact[0, 1]


@on_ranks(3, device=DEVICES)
def test_gradients(rank: int, world_size: int) -> None:
    for name, (_, added, named) in KINDS.items():
        shape = (6, 5, 8)
        x = torch.randn(shape).requires_grad_()
        residual = torch.randn(shape).requires_grad_() if added else None
        weight = torch.randn(shape[-1:]).requires_grad_()
        on_normed, on_sums = torch.randn(shape), torch.randn(shape)
        normed, sums = fused_all_reduce_rms_norm(x, residual, weight, EPS, world(), **named)
        ((normed * on_normed).sum() + (sums * on_sums).sum()).backward()
        wide = sum(gather(x)) if residual is None else sum(gather(x)) + residual.detach().double()
        wide, w = wide.requires_grad_(), weight.detach().double().requires_grad_()
        want = rms_norm(wide, w, EPS, named.get("weight_offset", 0.0))
        ((want * on_normed).sum() + (wide * on_sums).sum()).backward()
        if residual is not None:
            check(f"{name} residual.grad", residual.grad, wide.grad, 1e-6)
        check(f"{name} weight.grad", weight.grad, w.grad, 1e-6)
        check(f"{name} x.grad", x.grad, sum(gather(wide.grad)), 1e-6)
    half, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(8).requires_grad_()
    fused_all_reduce_rms_norm(half, None, weight, EPS, world())[0].sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@on_ranks(1, device=DEVICES)
def test_bad_input_is_refused(rank: int, world_size: int) -> None:
    x, name = torch.randn(4, 8).bfloat16(), world().group_name
    for args, kind, words in [
        (
            (x, None, x[0].half(), EPS, name),
            TypeError,
            "weight: is torch.float16, must be torch.bfloat16 like x or torch.float32",
        ),
        ((x, x.float(), x[0], EPS, name), TypeError, "residual: is torch.float32, must be torch.bfloat16"),
    ]:
        refuses(torch.ops.weft.fused_all_reduce_rms_norm, args, kind, words)
    with pytest.raises(ValueError, match="weight_offset: is nan, must be finite"):
        fused_all_reduce_rms_norm(x, x, x[0], EPS, name, weight_offset=float("nan"))
    with pytest.raises(TypeError, match="weight_offset: is of type str, must be a number"):
        fused_all_reduce_rms_norm(x, x, x[0], EPS, name, weight_offset="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="round_sum: is of type int, must be True or False"):
        fused_all_reduce_rms_norm(x, x, x[0], EPS, name, round_sum=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="residual: is of type int, must be a tensor"):
        fused_all_reduce_rms_norm(x, 0, x[0], EPS, name)  # type: ignore[arg-type]
