"""Scaled products beside collectives that weft's ops do not compute exactly: left alone, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scaled_graphs as scaled
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graphs import AG, Seen, applied, captured, check_same, gather, scatter, traced
from torch import Tensor

WORLD = 2
pytestmark = pytest.mark.usefixtures("two")


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(scaled.BF16)


def fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(scaled.E4M3)


def one() -> Tensor:
    return torch.rand(())


def whole_after(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    g = gather(x)
    scale = scaled.scale_of(scaled.whole_amax(g))
    return scaled.times(scaled.by_scale(g, scale), w, scale.reciprocal(), ws)


def whole_of_shard(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    scale = scaled.scale_of(scaled.whole_amax(x))
    return scaled.times(scaled.by_scale(gather(x), scale), w, scale.reciprocal(), ws)


def summed_over_ranks(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    scale = scaled.scale_of(scaled.all_reduce(scaled.whole_amax(x), "sum"))
    return scaled.times(scaled.by_scale(gather(x), scale), w, scale.reciprocal(), ws)


def reduced_after(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    """The maximum is taken over ranks, but of what is gathered: it is there too late."""
    g = gather(x)
    scale = scaled.scale_of(scaled.all_reduce(scaled.whole_amax(g)))
    return scaled.times(scaled.by_scale(g, scale), w, scale.reciprocal(), ws)


def twice(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    g = gather(x)
    (a, sa), (b, sb) = scaled.by_rows(g), scaled.by_rows(g, power_of_two=True)
    return scaled.times(a, w, sa, ws) + scaled.times(b, w, sb, ws)


def also_used(x: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
    g = gather(x)
    q, s = scaled.by_rows(g)
    return scaled.times(q, w, s, ws), g.float().sum()


def scales_also_used(x: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
    q, s = scaled.by_rows(gather(x))
    return scaled.times(q, w, s, ws), s


def history(x: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
    g = gather(x)
    amax = g.abs().amax(-1, keepdim=True)
    scale = scaled.scale_of(amax)
    return scaled.times(scaled.by_scale(g, scale), w, scale.reciprocal(), ws), amax


def columns_by_rows(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    q, s = scaled.by_rows(gather(x, 1))
    return scaled.times(q, w, s, ws)


def columns_with_given_rows(x: Tensor, s: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    return scaled.times(gather(x, 1), w, s, ws)


def smoothed(x: Tensor, by: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    q, s = scaled.by_rows(gather(x) * by)
    return scaled.times(q, w, s, ws)


def by_an_element(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    """Of the shard, which is no scale that all ranks have."""
    scale = x[0, 0].float()
    return scaled.times(scaled.by_scale(gather(x), scale), w, scale.reciprocal(), ws)


def five(x: Tensor, ws: Tensor, *w: Tensor) -> list[Tensor]:
    q, s = scaled.by_rows(gather(x))
    return [scaled.times(q, each, s, ws) for each in w]


def other_rows(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    g = gather(x, 1)
    q, s = scaled.by_rows(g)
    return scaled.times(q.flatten(0, 1), w, s.transpose(0, 1).flatten(0, 1).contiguous(), ws)


def flipped(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    q, s = scaled.by_rows(gather(x))
    return scaled.times(q, w, s.flip(0), ws)


def summed_rows(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    g = gather(x)
    scale = scaled.scale_of(g.abs().float().mean(-1, keepdim=True))
    return scaled.times(scaled.by_scale(g, scale), w, scale.reciprocal(), ws)


def quantised_result(x: Tensor, s: Tensor, w: Tensor, ws: Tensor, rs: Tensor) -> Tensor:
    return scaled.times(gather(x), w, s, ws, out_dtype=scaled.E4M3, scale_result=rs).to(scaled.BF16)


def result_scale(x: Tensor, s: Tensor, w: Tensor, ws: Tensor, rs: Tensor) -> Tensor:
    return scaled.times(gather(x), w, s, ws, scale_result=rs)


def right_operand(x: Tensor, q: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scaled.times(q, gather(x), s, ws)


def dropped(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
    q, s = scaled.by_rows(torch.nn.functional.dropout(gather(x), 0.5))
    return scaled.times(q, w, s, ws)


def of(fn: Callable[..., Any], words: str, *inputs: Tensor) -> Any:
    return pytest.param(fn, inputs, words, id=fn.__name__)


X, W = (5, 32), (48, 32)


@pytest.mark.parametrize(
    ("fn", "inputs", "words"),
    [
        of(whole_after, "the maximum over the rows of all ranks", bf16(*X), fp8(*W), one()),
        of(whole_of_shard, "of no maximum over the ranks", bf16(*X), fp8(*W), one()),
        of(summed_over_ranks, "of no maximum over the ranks", bf16(*X), fp8(*W), one()),
        of(reduced_after, "is also used by abs_1", bf16(*X), fp8(*W), one()),
        of(twice, "is also used by", bf16(*X), fp8(*W), torch.rand(1, 48)),
        of(also_used, "is also used by", bf16(*X), fp8(*W), torch.rand(1, 48)),
        of(scales_also_used, "is also used by the graph's output", bf16(*X), fp8(*W), torch.rand(1, 48)),
        of(history, "is also used by", bf16(*X), fp8(*W), torch.rand(1, 48)),
        of(
            columns_by_rows,
            "the maximum over the rows of all ranks",
            bf16(*X),
            fp8(48, 64),
            torch.rand(1, 48),
        ),
        of(
            columns_with_given_rows,
            "row-wise scales are not gathered with it",
            *(fp8(*X), torch.rand(5, 1), fp8(48, 64), torch.rand(1, 48)),
        ),
        of(smoothed, "which each rank may have otherwise", bf16(*X), bf16(32), fp8(*W), torch.rand(1, 48)),
        of(by_an_element, "of no maximum over the ranks", bf16(*X), fp8(*W), one()),
        of(five, "5 scaled products take it", bf16(*X), torch.rand(1, 48), *(fp8(*W) for _ in range(5))),
        of(other_rows, "are those of other rows", bf16(4, 8, 32), fp8(*W), torch.rand(1, 48)),
        of(flipped, "rev (rev.default) is not computed row by row", bf16(*X), fp8(*W), torch.rand(1, 48)),
        of(summed_rows, "is not computed row by row", bf16(*X), fp8(*W), torch.rand(1, 48)),
        of(quantised_result, "it has a scale of its result", fp8(*X), one(), fp8(*W), one(), one()),
        of(result_scale, "it has a scale of its result", fp8(*X), one(), fp8(*W), one(), one()),
        of(right_operand, "is no left operand of it", fp8(24, 32), fp8(8, 32), one(), one()),
        of(dropped, "which each rank may have otherwise", bf16(*X), fp8(*W), torch.rand(1, 48)),
    ],
)
def test_gathers_left_alone(fn: Callable[..., Any], inputs: tuple[Tensor, ...], words: str) -> None:
    (seen,) = captured(fn, *inputs, runs=False)
    check_left(seen, words)


def check_left(seen: Seen, words: str) -> None:
    """Nothing of a product is fused, and the reason has these words."""
    assert not {scaled.AGS, scaled.SRS} & {*seen.fused}
    reasons = [e.reason for e in seen.entries if "all_reduce" not in e.collective]
    assert any(words in reason for reason in reasons), reasons
    assert seen.count("aten::_scaled_mm") > 0


def test_a_plain_product_beside_takes_the_gather() -> None:
    """The gathered tensor is needed as it is: weft's op of bf16 gives it to both."""

    def fn(x: Tensor, w: Tensor, ws: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        g = gather(x)
        q, s = scaled.by_rows(g)
        return scaled.times(q, w, s, ws), g @ v

    (seen,) = captured(fn, bf16(5, 32), fp8(48, 32), torch.rand(1, 48), bf16(32, 16))
    assert seen.fused == [AG]
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


@pytest.mark.parametrize("of_scales", [False, True])
def test_another_group(of_scales: bool) -> None:
    """What is gathered or reduced over other ranks is not the same on these."""
    other = dist.new_group([0, 1])

    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        if of_scales:
            q, s = scaled.by_rows(x)
            return scaled.times(gather(q), w, funcol.all_gather_tensor(s, 0, other), ws)
        scale = scaled.scale_of(funcol.all_reduce(scaled.whole_amax(x), "max", other))
        return scaled.times(scaled.by_scale(gather(x), scale), w, scale.reciprocal(), ws)

    (seen,) = captured(fn, bf16(5, 32), fp8(48, 32), torch.rand(1, 48) if of_scales else one(), runs=False)
    if of_scales:  # those of all rows are there, as a scale of each row
        assert seen.fused.count(scaled.AGS) <= 1
        check_same(seen, WORLD, scaled.ScaledRanks(WORLD))
    else:
        check_left(seen, "of no maximum over the ranks")


def test_what_is_written_between() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
        g = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "0")
        )
        torch.ops.aten.mul_.Tensor(s, 2.0)
        return torch.ops.aten._scaled_mm.default(g, w.t(), s, ws, None, None, scaled.BF16, True)

    seen = applied(traced(fn, fp8(5, 32), fp8(48, 32), one(), one()))
    check_left(seen, "writes to memory before")


def test_a_right_operand_of_the_wrong_order() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
        g = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "0")
        )
        return torch.ops.aten._scaled_mm.default(g, w, s, ws, None, None, scaled.BF16, True)

    seen = applied(traced(fn, fp8(5, 32), fp8(32, 48), one(), one()))
    check_left(seen, "is not column-major")


@pytest.mark.parametrize("bound", [3.0, 448.0, 1e4])
def test_other_bounds_are_kept(bound: float) -> None:
    """What saturates is computed of the shard as it was of the whole."""

    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        g = gather(x)
        scale = scaled.scale_of(g.abs().amax(-1, keepdim=True))
        q = (g.float() * scale).clamp(-bound, bound / 2).to(scaled.E4M3)
        return scaled.times(q, w, scale.reciprocal(), ws)

    (seen,) = captured(fn, bf16(5, 32), fp8(48, 32), torch.rand(1, 48), runs=False)
    assert seen.fused == [scaled.AGS]
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def test_each_product_keeps_its_accumulation_and_dtype() -> None:
    def fn(x: Tensor, v: Tensor, vs: Tensor, w: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
        q, s = scaled.by_rows(gather(x))
        return scaled.times(q, v, s, vs), scaled.times(
            q, w, s, ws, use_fast_accum=False, out_dtype=torch.float32
        )

    inputs = bf16(5, 32), fp8(48, 32), torch.rand(1, 48), fp8(16, 32), torch.rand(1, 16)
    (seen,) = captured(fn, *inputs)
    (op,) = seen.after.find_nodes(
        op="call_function", target=torch.ops.weft.fused_all_gather_scaled_matmul.default
    )
    assert op.args[8:10] == ([scaled.BF16, torch.float32], [True, False])
    check_same(seen, WORLD, scaled.ScaledRanks(WORLD))


def product_used(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
    y = scaled.times(x, w, s, ws)
    return scatter(y), y


def multiplied(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scatter(scaled.times(x, w, s, ws) * 0.5)


def widened(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scatter(scaled.times(x, w, s, ws).float())


def fp8_cast(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scatter(scaled.times(x, w, s, ws, out_dtype=scaled.E4M3).to(scaled.BF16))


def two_products(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scatter(scaled.times(x, w, s, ws) + scaled.times(x, w, ws, s))


def added(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scatter(scaled.times(x, w, s, ws) + ws.to(scaled.BF16))


def maximum_scattered(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
    return scatter(scaled.times(x, w, s, ws), reduce_op="max")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (product_used, "is also used by"),
        (multiplied, "multiplies the scaled product by 0.5"),
        (widened, "is rounded to torch.bfloat16 and then cast"),
        (fp8_cast, "its result is torch.float8_e4m3fn"),
        (two_products, "not a matrix product"),
        (added, "of another shape"),
        (maximum_scattered, "it reduces by 'max'"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_scatters_left_alone(fn: Callable[..., Any], words: str) -> None:
    (seen,) = captured(fn, fp8(6, 32), fp8(48, 32), one(), one(), runs=False)
    check_left(seen, words)


def test_what_is_rounded_twice_is_left_alone() -> None:
    """As Inductor leaves no graph, but another pass may."""

    def fn(x: Tensor, w: Tensor, s: Tensor, ws: Tensor) -> Tensor:
        y = torch.ops.aten._scaled_mm.default(x, w.t(), s, ws, None, None, torch.float32, True)
        for dtype in (torch.float16, scaled.BF16):
            y = torch.ops.prims.convert_element_type.default(y, dtype)
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "sum", 2, "0"))

    seen = applied(traced(fn, fp8(6, 32), fp8(48, 32), one(), one()))
    check_left(seen, "is rounded to torch.float32 and then cast")


def test_an_unknown_block_scaling_is_left_alone() -> None:
    """B scaled by 1 x 128, for which the ops have no place."""

    def fn(x: Tensor, w: Tensor, ws: Tensor) -> Tensor:
        q, s = scaled.by_blocks(gather(x))
        return scaled.times(q, w, s, ws, use_fast_accum=False)

    (seen,) = captured(fn, bf16(4, 384), fp8(256, 384), torch.rand(3, 256), runs=False)
    check_left(seen, "does not take what it would get")
