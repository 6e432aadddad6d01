"""one_shot_reduce_scatter on real CPU processes, against float64."""

from __future__ import annotations

import pytest
import torch
from opcommon import DEVICES, DTYPES, assert_fused, check, gather, poison, refuses, world
from ranks import on_ranks, run_row
from references import held
from weft.fused_ops import last_plan, one_shot_all_reduce, one_shot_reduce_scatter

SHAPES = [(1,), (7,), (3, 5), (2, 3, 129), (0, 4), (4, 0), (1000, 33), (2, 1, 3, 8)]


def whole(shape: tuple[int, ...], dim: int, world_size: int) -> tuple[int, ...]:
    sizes = list(shape)
    sizes[dim] *= world_size
    return tuple(sizes)


def right(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for dim in (*range(len(shape)), -1):
        for reduce_op in ("sum", "avg", "max", "min"):
            poison(rank)
            x = torch.randn(whole(shape, dim, world_size)).to(dtype)
            given = {"x": x, "reduce_op": reduce_op, "scatter_dim": dim, "group": world()}
            y = held(one_shot_reduce_scatter, **given)
            if x.numel() and world_size > 1:
                assert_fused()
            assert y.shape == shape and y.dtype == dtype and y.is_contiguous()
            if not x.numel():
                continue
            total = one_shot_all_reduce(x, reduce_op, world()).chunk(world_size, dim)[rank]
            assert torch.equal(y, total), "other bits than those of the all-reduce"
            apart = y.new_zeros((*y.shape[:-1], 2 * y.shape[-1]))[..., ::2]
            # The result takes the place of the own part, too.
            for out in (torch.full_like(y, float("nan")), apart, x.chunk(world_size, dim)[rank]):
                assert one_shot_reduce_scatter(**given, out=out) is out
                assert torch.equal(out, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_shot_reduce_scatter(world_size: int, device: str, dtype: torch.dtype) -> None:
    # Each shape between so many CPU ranks with one dtype.
    for shape in SHAPES if device == "cuda" else SHAPES[(world_size + DTYPES.index(dtype)) % 3 :: 3]:
        run_row(right, world_size, shape, dtype, device=device)


@on_ranks(3, device=DEVICES)
def test_any_strides_alignment_and_memory(rank: int, world_size: int) -> None:
    base = torch.randn(9, 12, 6)
    odd = base.bfloat16().view(-1)[3:]  # begins 6 bytes after an aligned address
    for x in (base.transpose(0, 2), base[::3, 1:10:3], base[3, 6:], odd, torch.ones(1, 3).expand(6, 3)):
        for dim in range(x.dim()):
            held(one_shot_reduce_scatter, x=x, reduce_op="sum", scatter_dim=dim, group=world())
    # What is read must not be overwritten by the result.
    for start in (0, 3, 4 * (world_size - 1)):
        memory = torch.randn(4 * world_size)
        want = sum(gather(memory)).chunk(world_size)[rank]
        out = memory[start : start + 4]
        check("overlapping", one_shot_reduce_scatter(memory, "sum", 0, world(), out=out), want, 1e-6)


@on_ranks(3, device=DEVICES)
def test_what_takes_no_gradient(rank: int, world_size: int) -> None:
    x = torch.randn(2, 3, 2 * world_size).requires_grad_()
    with pytest.raises(ValueError, match="reduce_op: is 'max', must be 'sum' or 'avg'"):
        one_shot_reduce_scatter(x, "max", -1, world())
    out = torch.zeros(2, 3, 2)
    with pytest.raises(ValueError, match="x: requires a gradient, must not where the result is written"):
        one_shot_reduce_scatter(x, "sum", -1, world(), out=out)
    with pytest.raises(ValueError, match="out: requires a gradient"):
        one_shot_reduce_scatter(x.detach(), "sum", -1, world(), out=out.requires_grad_())
    with torch.no_grad():
        one_shot_reduce_scatter(x, "sum", -1, world(), out=out)


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, name, out = torch.randn(4, 3), world().group_name, torch.zeros(2, 3)
    before = last_plan()
    for args, kind, words in [
        ((x[0, 0], "sum", 0, name), ValueError, "x: has no dimension, must have 1 or more"),
        ((x, "sum", -3, name), ValueError, "scatter_dim: is -3, must be from -2 to 1 for a 2-D x"),
        ((x, "sum", 1, name), ValueError, "scatter_dim: x has size 3 there, must be a multiple of 2 ranks"),
        ((x, "product", 0, name), ValueError, "reduce_op: is 'product', must be one of 'sum', 'avg', 'max'"),
        ((x.double(), "sum", 0, name), TypeError, "x: is torch.float64, must be float32, bfloat16"),
        ((x, "sum", 0, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(torch.ops.weft.one_shot_reduce_scatter, args, kind, words)
    mode = torch._subclasses.FakeTensorMode()
    for given, words in [
        (out[:1], r"out: has shape \(1, 3\), must have \(2, 3\) for the result"),
        (out.bfloat16(), "out: is torch.bfloat16, must be torch.float32 like x"),
        (out[:1].expand(2, 3), "out: is expanded, must have memory of its own"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            one_shot_reduce_scatter(x, "sum", 0, world(), out=given)
        with pytest.raises((ValueError, TypeError), match=words):
            one_shot_reduce_scatter(mode.from_tensor(x), "sum", 0, world(), out=mode.from_tensor(given))
    with pytest.raises(TypeError, match="scatter_dim: is of type float, must be an integer"):
        one_shot_reduce_scatter(x, "sum", 0.0, world())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out: is of type int, must be a tensor"):
        one_shot_reduce_scatter(x, "sum", 0, world(), out=3)  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"
