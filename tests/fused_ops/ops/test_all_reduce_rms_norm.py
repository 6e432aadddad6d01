"""fused_all_reduce_rms_norm, with another weight, sum or without a residual, too, on CPU processes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcommon import (
    BOUND,
    DEVICES,
    DTYPES,
    assert_alike,
    assert_fused,
    cells,
    check,
    gather,
    poison,
    refuses,
    same_on_all,
    world,
)
from ranks import on_ranks
from references import exact, held_gradients, of_every_rank
from weft import fused_ops
from weft.kernels.all_reduce_rms_norm.reference import rms_norm

EPS = 1e-5
SHAPES = [(8,), (1, 8), (7, 24), (2, 3, 136), (0, 8), (5, 33), (130, 200), (66, 512)]
# Whether the weight is float32, whether there is a residual, and the arguments.
KINDS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "unrounded": (False, True, {"round_sum": False}),
    "Gemma": (False, True, {"weight_offset": 1.0}),
    "float32 weight": (True, True, {}),
    "all of it": (True, True, {"round_sum": False, "weight_offset": 0.5}),
    "no residual": (False, False, {}),
    "no residual, Gemma": (True, False, {"weight_offset": 1.0}),
}


@pytest.mark.parametrize(
    ("world_size", "device", "shape", "dtype"), cells([1, 2, 3, 4], [(shape,) for shape in SHAPES])
)
@on_ranks(None, device=None)
def test_fused_all_reduce_rms_norm(
    rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    poison(rank)
    x = torch.randn(shape).to(dtype)
    # Each rank adds its own residual and scales with its own weight.
    residual, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    total = fused_ops.one_shot_all_reduce(x, "sum", world())
    given = {"x": x, "residual": residual, "weight": weight, "eps": EPS, "group": world()}
    normed, sums = fused_ops.fused_all_reduce_rms_norm(**given)
    if x.numel() and world_size > 1:
        assert_fused()
    what = f"{shape} {dtype}"
    assert normed.is_contiguous() and sums.is_contiguous() and normed.dtype == sums.dtype == dtype
    assert torch.equal(sums, total + residual), f"sums {what}"
    _, (want, parts) = exact("fused_all_reduce_rms_norm", of_every_rank(given), rank)
    check(f"sums {what}", sums, want, BOUND[dtype], parts)
    # The norm is that of the rounded sums: what is added to their error is one rounding.
    check(f"normed {what}", normed, rms_norm(sums.double(), weight.double(), EPS), BOUND[dtype])
    again = fused_ops.fused_all_reduce_rms_norm(x, residual, weight, EPS, world())
    assert torch.equal(again[0], normed) and torch.equal(again[1], sums), "other bits in another run"
    same = same_on_all(*shape, dtype=dtype), same_on_all(shape[-1], dtype=dtype)
    for out in fused_ops.fused_all_reduce_rms_norm(x, *same, EPS, world()):
        assert_alike(out)


@on_ranks(3, device=DEVICES)
def test_any_strides_and_alignment(rank: int, world_size: int) -> None:
    base = torch.randn(9, 11, 16)
    residual = same_on_all(9, 11, 16, dtype=torch.float32)
    weight = same_on_all(2, 16, dtype=torch.float32)
    odd = base.bfloat16().view(-1)[1:17]  # begins 2 bytes after an aligned address
    cases = [
        (base.transpose(0, 1), residual.transpose(0, 1), weight[1]),
        (base[::2, 1:8:3], residual[::2, 1:8:3], weight.t().contiguous().t()[0]),
        (odd, residual.bfloat16().view(-1)[3:19], weight[0].bfloat16()),
    ]
    for x, r, w in cases:
        parts = [*gather(x), r.double()]
        normed, sums = fused_ops.fused_all_reduce_rms_norm(x, r, w, 0.0, world())
        check(f"sums {x.stride()}", sums, sum(parts), BOUND[x.dtype], parts)
        check(f"normed {x.stride()}", normed, rms_norm(sums.double(), w.double(), 0.0), BOUND[x.dtype])


@on_ranks(2, device=DEVICES)
def test_eps_shows(rank: int, world_size: int) -> None:
    """Rows whose mean square is as small as eps, and eps of 0, which is no default; forward and backward."""
    for eps, dtype in ((0.0, torch.float32), (1e-2, torch.float32), (1e-2, torch.bfloat16)):
        x, residual = (0.1 * torch.randn(5, 40)).to(dtype), (0.05 * torch.randn(5, 40)).to(dtype)
        weight, on_normed = torch.randn(40).to(dtype), torch.randn(5, 40)
        given = x.requires_grad_(), residual, weight
        for subtract_mean in (False, True):
            if subtract_mean:
                normed, sums = fused_ops.fused_all_reduce_layer_norm(*given, None, eps, world())
            else:
                normed, sums = fused_ops.fused_all_reduce_rms_norm(*given, eps, world())
            x.grad = None
            (normed * on_normed).sum().backward()
            wide = sums.detach().double().requires_grad_()
            of = wide - wide.mean(-1, keepdim=True) if subtract_mean else wide
            want = of / (of.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
            (want * on_normed).sum().backward()
            check(f"normed, eps {eps}, {dtype}, {subtract_mean}", normed, want, BOUND[dtype])
            check(f"x.grad, eps {eps}", x.grad, sum(gather(wide.grad)), 2 * BOUND[dtype])
        scale = torch.tensor([[0.125]])
        quantized, _, _ = fused_ops.fused_all_reduce_rms_norm_quant(
            *(t.detach() for t in given), eps, world(), scale=scale
        )
        of = sums.detach().double()
        want = of * (of.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        check(f"quantized, eps {eps}", quantized.float() * scale, want, 0.05)  # 3 bits


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks([1, 2, 3], device=DEVICES)
def test_other_kinds(rank: int, world_size: int, dtype: torch.dtype) -> None:
    poison(rank)
    for name, (wide, added, named) in KINDS.items():
        for shape in [(8,), (2, 3, 136), (0, 8), (5, 33), (66, 512)]:
            x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) if added else None
            weight = torch.randn(shape[-1]).to(torch.float32 if wide else dtype)
            total = fused_ops.one_shot_all_reduce(x, "sum", world())
            normed, sums = fused_ops.fused_all_reduce_rms_norm(x, residual, weight, EPS, world(), **named)
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
    rounded, _ = fused_ops.fused_all_reduce_rms_norm(x, residual, weight, 0.0, world())
    exact, sums = fused_ops.fused_all_reduce_rms_norm(x, residual, weight, 0.0, world(), round_sum=False)
    assert sums.tolist() == [[256.0, 3.0]]
    for normed, row in ((rounded, [256.0, 3.0]), (exact, [257.0, 3.0])):
        want = rms_norm(torch.tensor([row], dtype=torch.float64), torch.ones(2), 0.0)
        assert torch.equal(normed, want.bfloat16()), row
    assert rounded[0, 1] != exact[0, 1]


@pytest.mark.parametrize("shape", [(6, 5, 8), (8,), (0, 8), (7, 1)])
@on_ranks(3, device=DEVICES)
def test_gradients(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    others = KINDS if shape == (6, 5, 8) else {}
    for _, added, named in [(False, True, {}), *others.values()]:
        given = {"x": torch.randn(shape), "residual": torch.randn(shape) if added else None}
        given["weight"] = torch.randn(shape[-1:])
        wanted = {name: t if t is None else t.requires_grad_() for name, t in given.items()}
        held_gradients(fused_ops.fused_all_reduce_rms_norm, **wanted, eps=EPS, group=world(), **named)


@on_ranks(2, device=DEVICES)
def test_gradients_have_their_inputs_dtypes(rank: int, world_size: int) -> None:
    half, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(8).requires_grad_()
    fused_ops.fused_all_reduce_rms_norm(half, None, weight, EPS, world())[0].sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@on_ranks(1, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, weight, name = torch.randn(4, 8), torch.randn(8), world().group_name
    for args, kind, words in [
        ((x.double(), x, weight, EPS, name), TypeError, "x: is torch.float64, must be float32"),
        ((x.new_empty(()), x, weight, EPS, name), ValueError, "x: has no dimension, must have 1 or more"),
        ((x, x[:3], weight, EPS, name), ValueError, r"residual: has shape \(3, 8\), must have \(4, 8\)"),
        ((x, x.half(), weight, EPS, name), TypeError, "residual: is torch.float16, must be torch.float32"),
        ((x, x, weight[:4], EPS, name), ValueError, r"weight: has shape \(4,\), must have \(8,\)"),
        ((x, x, weight.double(), EPS, name), TypeError, "weight: is torch.float64, must be torch.float32"),
        ((x.bfloat16(), None, weight.half(), EPS, name), TypeError, "weight: is torch.float16"),
        ((x, x, weight, -1.0, name), ValueError, "eps: is -1.0, must be 0 or more"),
        ((x, x, weight, EPS, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(torch.ops.weft.fused_all_reduce_rms_norm, args, kind, words)
    with pytest.raises(ValueError, match="weight_offset: is nan, must be finite"):
        fused_ops.fused_all_reduce_rms_norm(x, x, weight, EPS, name, weight_offset=float("nan"))
    with pytest.raises(TypeError, match="weight_offset: is of type str, must be a number"):
        fused_ops.fused_all_reduce_rms_norm(x, x, weight, EPS, name, weight_offset="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="round_sum: is of type int, must be True or False"):
        fused_ops.fused_all_reduce_rms_norm(x, x, weight, EPS, name, round_sum=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="residual: is of type int, must be a tensor"):
        fused_ops.fused_all_reduce_rms_norm(x, 0, weight, EPS, name)  # type: ignore[arg-type]
