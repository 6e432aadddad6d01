"""fused_all_reduce_layer_norm on real CPU processes, against float64."""

from __future__ import annotations

import pytest
import torch
from opcommon import BOUND, DEVICES, DTYPES, assert_fused, check, poison, refuses, world
from ranks import on_ranks
from references import held_gradients, norm
from torch import Tensor
from weft.fused_ops import fused_all_reduce_layer_norm, one_shot_all_reduce

EPS = 1e-5
SHAPES = [(8,), (2, 3, 136), (0, 8), (5, 33), (66, 512)]
# Whether there are residual, weight and bias, and whether these two are float32.
KINDS: dict[str, tuple[bool, bool, bool, bool]] = {
    "usual": (True, True, True, False),
    "float32 weight": (True, True, True, True),
    "no residual": (False, True, True, False),
    "no bias": (True, True, False, False),
    "only a bias": (True, False, True, True),
    "neither": (False, False, False, False),
}


def reference(
    of: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = EPS, offset: float = 0.0
) -> Tensor:
    given = {"weight": weight, "bias": bias, "eps": eps, "weight_offset": offset}
    return norm("layer_norm", given, of.double())


def operands(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor | None]:
    """x, residual, weight and bias, those that there are."""
    added, weighed, biased, wide = KINDS[name]
    columns = torch.float32 if wide else dtype
    residual = torch.randn(shape).to(dtype) if added else None
    weight = torch.randn(shape[-1]).to(columns) if weighed else None
    return [
        torch.randn(shape).to(dtype),
        residual,
        weight,
        torch.randn(shape[-1]).to(columns) if biased else None,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks([1, 2, 3], device=DEVICES)
def test_values(rank: int, world_size: int, dtype: torch.dtype) -> None:
    poison(rank)
    for name in KINDS:
        for shape in SHAPES:
            x, residual, weight, bias = operands(name, shape, dtype)
            total = one_shot_all_reduce(x, "sum", world())
            normed, sums = fused_all_reduce_layer_norm(x, residual, weight, bias, EPS, world())
            what = f"{name} {shape} {dtype}"
            if x.numel() and world_size > 1:
                assert_fused()
            assert normed.is_contiguous() and sums.is_contiguous() and normed.dtype == sums.dtype == dtype
            assert torch.equal(sums, total if residual is None else total + residual), f"sums {what}"
            check(what, normed, reference(sums, weight, bias), BOUND[dtype])
            again = fused_all_reduce_layer_norm(x, residual, weight, bias, EPS, world())
            assert torch.equal(again[0], normed) and torch.equal(again[1], sums), "other bits in another run"


@on_ranks(2, device=DEVICES)
def test_the_variance_is_that_around_the_mean(rank: int, world_size: int) -> None:
    """Numbers whose mean is 30,000 times their deviation: the difference of the mean square and the squared mean would
    have nothing left of the variance in float32."""
    hidden = 264
    x = torch.full((4, hidden), 1024.0 / world_size)
    residual = torch.linspace(-0.0625, 0.0625, hidden).expand(4, hidden).contiguous()
    normed, sums = fused_all_reduce_layer_norm(x, residual, None, None, 0.0, world())
    check("far from zero", normed, reference(sums, None, None, 0.0), 1e-3)


@on_ranks(2, device=DEVICES)
def test_a_number_is_added_to_the_weight(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for name in ("usual", "float32 weight", "no bias"):
            x, residual, weight, bias = operands(name, (5, 136), dtype)
            normed, sums = fused_all_reduce_layer_norm(
                x, residual, weight, bias, EPS, world(), weight_offset=1.0
            )
            check(name, normed, reference(sums, weight, bias, offset=1.0), BOUND[dtype])
    names = ("x", "residual", "weight", "bias")
    given = dict(zip(names, operands("usual", (4, 8), torch.float32), strict=True))
    for t in given.values():
        t.requires_grad_()
    held_gradients(fused_all_reduce_layer_norm, **given, eps=EPS, group=world(), weight_offset=0.5)


@on_ranks(2, device=DEVICES)
def test_any_strides(rank: int, world_size: int) -> None:
    x, residual = torch.randn(9, 11, 16), torch.randn(9, 11, 16)
    columns = torch.randn(16, 2)
    for a, r in [(x.transpose(0, 1), residual.transpose(0, 1)), (x[::2, 1:8:3], residual[::2, 1:8:3])]:
        normed, sums = fused_all_reduce_layer_norm(a, r, *columns.t(), EPS, world())
        check(f"{a.stride()}", normed, reference(sums, *columns.t()), 1e-6)


@on_ranks(3, device=DEVICES)
def test_gradients(rank: int, world_size: int) -> None:
    for name in KINDS:
        for shape in [(6, 5, 8), (8,), (0, 8)]:
            of_all = zip(
                ("x", "residual", "weight", "bias"), operands(name, shape, torch.float32), strict=True
            )
            given = {what: t if t is None else t.requires_grad_() for what, t in of_all}
            held_gradients(fused_all_reduce_layer_norm, **given, eps=EPS, group=world())


@on_ranks(1, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    op, x, name = torch.ops.weft.fused_all_reduce_layer_norm, torch.randn(4, 8), world().group_name
    row, half = x[0], x.bfloat16()
    for args, kind, words in [
        ((x.double(), x, row, row, EPS, name), TypeError, "x: is torch.float64, must be float32"),
        ((x.new_empty(()), None, None, None, EPS, name), ValueError, "x: has no dimension, must have 1 or"),
        ((x, x[:3], row, row, EPS, name), ValueError, r"residual: has shape \(3, 8\), must have \(4, 8\)"),
        ((half, x, None, None, EPS, name), TypeError, "residual: is torch.float32, must be torch.bfloat16"),
        ((x, x, row[:4], row, EPS, name), ValueError, r"weight: has shape \(4,\), must have \(8,\)"),
        ((x, x, None, x, EPS, name), ValueError, r"bias: has shape \(4, 8\), must have \(8,\)"),
        ((x, x, row.half(), None, EPS, name), TypeError, "weight: is torch.float16, must be torch.float32"),
        ((half, half, None, row.half(), EPS, name), TypeError, "bias: is torch.float16"),
        ((half, None, row, half[0], EPS, name), TypeError, "bias: is torch.bfloat16, must be torch.float32"),
        ((x, x, row, row, -1.0, name), ValueError, "eps: is -1.0, must be 0 or more"),
        ((x, x, row, row, EPS, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op, args, kind, words)
    with pytest.raises(TypeError, match="x: is of type NoneType, must be a tensor"):
        fused_all_reduce_layer_norm(None, x, row, row, EPS, name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bias: is of type int, must be a tensor"):
        fused_all_reduce_layer_norm(x, x, row, 0, EPS, name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight_offset: is 1\.0, must be 0 where there is no weight"):
        fused_all_reduce_layer_norm(x, x, None, row, EPS, name, weight_offset=1.0)
    with pytest.raises(TypeError, match="weight_offset: is of type str, must be a number"):
        fused_all_reduce_layer_norm(x, x, row, row, EPS, name, weight_offset="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="eps: is of type str, must be a number"):
        fused_all_reduce_layer_norm(x, x, row, row, "0", name)  # type: ignore[arg-type]
