"""Scaled products of fp8 after gathers and before reduce-scatters: what is fused computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scaled_graphs as scaled
import torch
from graphs import captured, check_same, gather, scatter
from torch import Tensor
from weft.fused_ops.passes import FusionPass

WORLD, GATHER = 2, "weft::one_shot_all_gather"
Made = tuple[Callable[..., Any], tuple[Tensor, ...]]
pytestmark = pytest.mark.usefixtures("two")


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(scaled.BF16)


def fp8(*shape: int, dtype: torch.dtype = scaled.E4M3) -> Tensor:
    return torch.randn(*shape).to(dtype)


def rows_gathered(**how: Any) -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_rows(gather(x), **how)
        return scaled.times(q, w, s, ws)

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(1, 48))


def sequence_gathered() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_rows(gather(x, 1))
        y = scaled.times(q.flatten(0, 1), w, s.flatten(0, 1), ws)
        return y.view(*q.shape[:2], -1)

    return fn, (bf16(3, 4, 32), fp8(48, 32), torch.rand(1, 48))


def rows_of_flat() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_rows(gather(x, 1).flatten(0, 1))
        return scaled.times(q, w, s, ws).view(3, -1, 48)

    return fn, (bf16(3, 4, 32), fp8(48, 32), torch.rand(1, 48))


def several() -> Made:
    def fn(x: Tensor, *ws: Tensor) -> list[Tensor]:
        q, s = scaled.by_rows(gather(x))
        return [
            scaled.times(q, w, s, scale, use_fast_accum=fast)
            for w, scale, fast in zip(ws[::2], ws[1::2], (True, False), strict=True)
        ]

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(1, 48), fp8(16, 32), torch.rand(1, 16))


def biased() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor, b: Tensor) -> Tensor:
        q, s = scaled.by_rows(gather(x))
        return scaled.times(q, w, s, ws, bias=b)

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(1, 48), bf16(48))


def numbers_kept() -> Made:
    """The quantised tensor is used once more, by the gradient of a weight."""

    def fn(x: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
        q, s = scaled.by_rows(gather(x))
        return scaled.times(q, w, s, ws), q.to(scaled.BF16).t()

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(1, 48))


def blocks_gathered() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_blocks(gather(x))
        return scaled.times(q, w, s, ws, use_fast_accum=False)

    return fn, (bf16(4, 384), fp8(256, 384), torch.rand(3, 2))


def given_scale() -> Made:
    def fn(x: Tensor, s: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        return scaled.times(scaled.by_scale(gather(x), s.reciprocal()), w, s, ws)

    return fn, (bf16(5, 32), torch.rand(()) + 0.5, fp8(48, 32), torch.rand(()))


def one_of_given_scales() -> Made:
    def fn(x: Tensor, s: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        return scaled.times(scaled.by_scale(gather(x, 1).flatten(0, 1), s[1]), w, s[1].reciprocal(), ws)

    return fn, (bf16(2, 3, 32), torch.rand(4) + 0.5, fp8(48, 32), torch.rand(1))


def constant_scale() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        return scaled.times(scaled.saturated(gather(x) * 4.0), w, torch.full((), 0.25), ws)

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(()))


def maximum_over_ranks() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        scale = scaled.scale_of(scaled.all_reduce(scaled.whole_amax(x)))
        return scaled.times(scaled.by_scale(gather(x), scale), w, scale.reciprocal(), ws)

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(()))


def fp8_gathered() -> Made:
    """torchao's Float8ColwiseParallel: what is cast is a shard, with the maximum of all shards."""

    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        scale = scaled.scale_of(scaled.all_reduce(scaled.whole_amax(x)))
        y = scaled.times(gather(scaled.by_scale(x, scale), 1).flatten(0, 1), w, scale.reciprocal(), ws)
        return y.view(2, -1, 48)

    return fn, (bf16(2, 3, 32), fp8(48, 32), torch.rand(()))


def gradient_gathered() -> Made:
    """Of a row-parallel layer: its grads are e5m2."""

    def fn(g: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        scale = scaled.scale_of(scaled.all_reduce(scaled.whole_amax(g)), scaled.E5M2)
        return scaled.times(
            gather(scaled.by_scale(g, scale, scaled.E5M2)), w, scale.reciprocal(), ws, use_fast_accum=False
        )

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(()))


def scales_gathered_beside() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_rows(x)
        return scaled.times(gather(q), w, gather(s), ws)

    return fn, (bf16(5, 32), fp8(48, 32), torch.rand(1, 48))


def scales_gathered_before() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        scale = scaled.scale_of(x.abs().amax(-1, keepdim=True))
        s = gather(scale, 1).flatten(0, 1).reciprocal()
        return scaled.times(gather(scaled.by_scale(x, scale), 1).flatten(0, 1), w, s, ws)

    return fn, (bf16(3, 4, 32), fp8(48, 32), torch.rand(1, 48))


def columns_gathered() -> Made:
    def fn(x: Tensor, s: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        return scaled.times(gather(x, 1), w, s, ws)

    return fn, (fp8(5, 32), torch.rand(()), fp8(48, 64), torch.rand(()))


def gathered_kept() -> Made:
    def fn(x: Tensor, s: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
        q = gather(x, 1)
        return scaled.times(q.flatten(0, 1), w, s, ws), q.flatten(0, 1).t().contiguous()

    return fn, (fp8(3, 4, 32), torch.rand(()), fp8(48, 32), torch.rand(()))


GATHERS = {
    f.__name__: f
    for f in (
        rows_gathered,
        sequence_gathered,
        rows_of_flat,
        several,
        biased,
        numbers_kept,
        blocks_gathered,
        given_scale,
        one_of_given_scales,
        constant_scale,
        maximum_over_ranks,
        fp8_gathered,
        gradient_gathered,
        scales_gathered_beside,
        scales_gathered_before,
        columns_gathered,
        gathered_kept,
    )
}


@pytest.mark.parametrize("name", GATHERS)
def test_gathers(name: str) -> None:
    fn, inputs = GATHERS[name]()
    (seen,) = captured(fn, *inputs, runs=name != "blocks_gathered")
    gathers = [e for e in seen.entries if "gather" in e.collective]
    assert {e.fused_into for e in gathers} == {scaled.AGS}, seen.reasons
    assert seen.count(scaled.AGS) == 1
    assert not seen.count("aten::_scaled_mm")
    assert not seen.count("_c10d_functional::all_gather_into_tensor")
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD, *[1] * ("given" in name)))


def product_scattered(dim: int, *lead: int, reduce_op: str = "sum", **more: Any) -> Made:
    """Scattered in the shape [*lead, N]."""

    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
        return scatter(scaled.times(x, w, s, ws, **more).view(*lead, -1), dim, reduce_op)

    m = 1
    for size in lead:
        m *= size
    return fn, (fp8(m, 32), fp8(48, 32), torch.rand(m, 1), torch.rand(1, 48))


def tensor_wise_scattered() -> Made:
    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor, b: Tensor) -> Tensor:
        return scatter(scaled.times(x, w, s, ws, bias=b).view(2, 4, -1), 1)

    return fn, (fp8(8, 32), fp8(48, 32), torch.rand(1, 1), torch.rand(()), bf16(48))


def cast_and_scattered() -> Made:
    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
        return scatter(scaled.times(x, w, s, ws, out_dtype=torch.float32).to(scaled.BF16))

    return fn, (fp8(6, 32), fp8(48, 32), torch.rand(()), torch.rand(()))


def quantised_and_scattered() -> Made:
    """torchao's Float8RowwiseParallel."""

    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_rows(x.flatten(0, 1))
        return scatter(scaled.times(q, w, s, ws).view(2, 4, -1), 1)

    return fn, (bf16(2, 4, 32), fp8(48, 32), torch.rand(1, 48))


def blocks_scattered() -> Made:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_blocks(x)
        return scatter(scaled.times(q, w, s, ws, use_fast_accum=False).view(2, 4, -1), 1)

    return fn, (bf16(8, 384), fp8(256, 384), torch.rand(3, 2))


SCATTERS: dict[str, Callable[[], Made]] = {
    "rows": lambda: product_scattered(0, 6),
    "average": lambda: product_scattered(0, 6, reduce_op="avg"),
    "sequence": lambda: product_scattered(1, 3, 4),
    "columns": lambda: product_scattered(1, 5),
    "columns of a sequence": lambda: product_scattered(2, 2, 3),
    "float32": lambda: product_scattered(0, 6, out_dtype=torch.float32),
    "tensor": tensor_wise_scattered,
    "cast": cast_and_scattered,
    "quantised": quantised_and_scattered,
    "blocks": blocks_scattered,
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scatters(name: str) -> None:
    fn, inputs = SCATTERS[name]()
    (seen,) = captured(fn, *inputs, runs=name != "blocks")
    assert seen.fused == [scaled.SRS], seen.reasons
    assert not seen.count("aten::_scaled_mm")
    assert not seen.count("_c10d_functional::reduce_scatter_tensor")
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def test_scales_of_another_product() -> None:
    """Two products of one gathered tensor, of which the second alone takes the gathered scales: each is entered."""

    def fn(x: Tensor, one: Tensor, w: Tensor, ws: Tensor, v: Tensor, vs: Tensor) -> tuple[Tensor, Tensor]:
        q, s = scaled.by_rows(x)
        s, q = gather(s), gather(q)
        return scaled.times(q, w, one, ws), scaled.times(q, v, s, vs)

    inputs = bf16(5, 32), torch.rand(()), fp8(48, 32), torch.rand(()), fp8(16, 32), torch.rand(1, 16)
    (seen,) = captured(fn, *inputs)
    assert sorted(map(str, seen.fused)) == ["None", scaled.AGS]
    assert all(e.fused_into or e.reason for e in seen.entries)
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


@pytest.mark.parametrize(
    "name", ["rows_gathered", "sequence_gathered", "fp8_gathered", "scales_gathered_beside"]
)
def test_sizes_that_change(name: str) -> None:
    fn, (x, *others) = GATHERS[name]()
    torch._dynamo.mark_dynamic(x, x.dim() - 2)
    (seen,) = captured(fn, x, *others, dynamic=True)
    assert scaled.AGS in seen.fused, seen.reasons
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def test_scatters_of_sizes_that_change() -> None:
    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_rows(x.flatten(0, 1))
        return scatter(scaled.times(q, w, s, ws).view(*x.shape[:2], -1), 1)

    x = bf16(2, 8, 32)
    torch._dynamo.mark_dynamic(x, 0)
    (seen,) = captured(fn, x, fp8(48, 32), torch.rand(1, 48), dynamic=True)
    assert seen.fused == [scaled.SRS], seen.reasons
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def test_fp8_alone() -> None:
    """No product takes it: alone it is gathered in one shot, unless that is ruled out."""
    for fusion, op in ((FusionPass(agree=False, collectives=False), None), (FusionPass(agree=False), GATHER)):
        (seen,) = captured(lambda x: gather(x).float(), fp8(5, 32), fusion=fusion, runs=False)
        assert seen.fused == [op], seen.reasons
        check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def second(q: Tensor, w: Tensor, s: Tensor, ws: Tensor, kind: tuple[int, int]) -> Tensor:
    """As torch.nn.functional.scaled_mm calls it."""
    swizzle = [1] * (kind[0] == 3)
    how = [s], [kind[0]], swizzle, [ws], [kind[1]], swizzle
    return torch.ops.aten._scaled_mm_v2(q, w.t(), *how, None, scaled.BF16, [], True)


def test_torchs_second_spelling() -> None:
    def fn(x: Tensor, w: Tensor, ws: Tensor, v: Tensor, vs: Tensor) -> tuple[Tensor, Tensor]:
        q, s = scaled.by_rows(gather(x))
        h, hs = scaled.by_rows(x)
        return second(q, w, s, ws, (1, 1)), scatter(second(h, v, hs, vs, (1, 1)))

    inputs = bf16(6, 32), fp8(48, 32), torch.rand(1, 48), fp8(16, 32), torch.rand(1, 16)
    (seen,) = captured(fn, *inputs)
    assert seen.fused == [scaled.AGS, scaled.SRS], seen.reasons
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def test_torchs_second_spelling_of_other_scales() -> None:
    """1 x 32 of e8m0, as in MX formats."""

    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
        return second(gather(x), w, s, ws, (3, 3))

    one = torch.ones(128 * 4, dtype=torch.float8_e8m0fnu)
    (seen,) = captured(fn, fp8(64, 128), fp8(128, 128), one, one, runs=False)
    assert seen.fused == [None] and "its scales are of the kinds [3] and [3]" in seen.reasons
