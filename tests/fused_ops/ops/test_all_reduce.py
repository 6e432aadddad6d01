"""one_shot_all_reduce on real CPU processes, against float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from opcommon import BOUND, DEVICES, assert_alike, assert_fused, cells, check, gather, poison, refuses, world
from ranks import on_ranks
from references import held
from weft import symm_mem
from weft.fused_ops import (
    float8_all_gather_matmul,
    float8_matmul_reduce_scatter,
    last_plan,
    one_shot_all_reduce,
    one_shot_all_reduce_,
)
from weft.kernels.all_reduce.reference import reference_all_reduce

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 129), (0, 4), (1000, 33)]


@pytest.mark.parametrize(
    ("world_size", "device", "shape", "dtype"), cells([1, 2, 3, 4], [(shape,) for shape in SHAPES])
)
@on_ranks(None, device=None)
def test_one_shot_all_reduce(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for reduce_op in ("sum", "avg", "max", "min"):
        poison(rank)
        x = torch.randn(shape).to(dtype)
        out = held(one_shot_all_reduce, x=x, reduce_op=reduce_op, group=world())
        if x.numel() and world_size > 1:
            assert_fused()
        assert (
            out.dtype == dtype and out.is_contiguous() and out.data_ptr() != x.data_ptr()
        ) or not x.numel()
        assert_alike(out)
        assert torch.equal(out, one_shot_all_reduce(x, reduce_op, world())), "other bits in another run"
        assert one_shot_all_reduce_(x, reduce_op, world()) is x
        assert torch.equal(out, x), "other bits in place"


@on_ranks(3, device=DEVICES)
def test_any_strides_alignment_and_memory(rank: int, world_size: int) -> None:
    base = torch.randn(9, 11, 6)
    odd = base.bfloat16().view(-1)[1:]  # begins 2 bytes after an aligned address
    for x in (base.transpose(0, 2), base[::2, 1:8:3], base[3, 4], odd):
        held(one_shot_all_reduce, x=x, reduce_op="sum", group=world())
    expanded = torch.full((1, 3), float(rank + 1)).expand(4, 3)
    assert (one_shot_all_reduce(expanded, "sum", world()) == sum(range(1, world_size + 1))).all()
    for x in (base.clone().transpose(0, 2), base.clone()[::2, 1:8:3], odd.clone()):
        parts = gather(x)
        one_shot_all_reduce_(x, "sum", world())
        check(f"in place {x.stride()}", x, sum(parts), BOUND[x.dtype], parts)
    on_heap = symm_mem.empty(13)
    on_heap.fill_(rank)
    assert (one_shot_all_reduce(on_heap, "sum", world()) == sum(range(world_size))).all()


@on_ranks(3, device=DEVICES)
def test_sums_are_rounded_once(rank: int, world_size: int) -> None:
    """256 + 1 is rounded to 256, 256 + 1 + 1 is 258."""
    x = torch.full((8,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    assert one_shot_all_reduce(x, "sum", world()).tolist() == [258.0] * 8


@on_ranks([2, 3], device=DEVICES)
def test_a_nan_of_one_rank_is_one_on_all(rank: int, world_size: int) -> None:
    """A NaN of one rank, in any position, is one on all ranks: fused, unfused, and in the scales of fp8 layers."""
    for (d, dtype), n in product(enumerate(BOUND), (1, 2, 9, 1000)):
        places = range(0, n, 1 + n // 10)
        for turn in range(max(len(places), world_size)):
            owner, place = (turn + d) % world_size, places[turn % len(places)]
            x = torch.randn(n, dtype=dtype)
            if rank == owner:
                x[place] = math.nan
            every = torch.stack(gather(x))
            for reduce_op, want in (("max", every.amax(0)), ("min", every.amin(0))):
                fused = one_shot_all_reduce(x, reduce_op, world())
                assert_alike(fused)
                for got in (fused, reference_all_reduce(x, reduce_op, world())):
                    assert torch.equal(got.isnan(), want.isnan()) and got[place].isnan()
                    assert torch.equal(got.nan_to_num().double(), want.nan_to_num())
    for owner in range(world_size):
        A, B = torch.randn(16, 32), torch.randn(32, 16)
        if rank == owner:
            A[3, 5] = math.nan
        assert float8_all_gather_matmul(A, [B], 0, world())[1][0].isnan().all()
        assert float8_matmul_reduce_scatter(A.repeat(world_size, 1), B, "sum", 0, world()).isnan().all()


@on_ranks(3, device=DEVICES)
def test_what_takes_no_gradient(rank: int, world_size: int) -> None:
    x = torch.randn(4, 3).requires_grad_()
    with pytest.raises(ValueError, match="reduce_op: is 'max', must be 'sum' or 'avg'"):
        one_shot_all_reduce(x, "max", world())
    with pytest.raises(ValueError, match="x: requires a gradient"):
        one_shot_all_reduce_(x, "sum", world())
    with torch.no_grad():
        one_shot_all_reduce_(x, "sum", world())


@on_ranks(1, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, name = torch.randn(4), world().group_name
    for args, kind, words in [
        ((x.double(), "sum", name), TypeError, "x: is torch.float64, must be float32, bfloat16 or float16"),
        ((x, "product", name), ValueError, "reduce_op: is 'product', must be one of 'sum', 'avg', 'max'"),
        ((x, "sum", "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(torch.ops.weft.one_shot_all_reduce, args, kind, words)


@on_ranks(2, device=DEVICES)
def test_what_shares_its_memory_is_not_overwritten(rank: int, world_size: int) -> None:
    x, before = torch.randn(1, 7).expand(5, 7), last_plan()
    for call in (one_shot_all_reduce_, torch.ops.weft.one_shot_all_reduce_):
        with pytest.raises(ValueError, match="x: is expanded, must have memory of its own for every element"):
            call(x, "sum", world().group_name)
        with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match="x: is expanded"):
            call(mode.from_tensor(x), "sum", world().group_name)
    with pytest.raises(Exception, match="x: is expanded"):
        torch.compile(one_shot_all_reduce_, backend="eager", fullgraph=True)(x, "sum", world())
    assert last_plan() is before, "refused after it was launched"
    # The group is as it was, and what has one element, or none, in a dimension of no stride is not refused.
    # (What expand() makes of one row keeps its stride.)
    one_row = torch.ones(7).as_strided((1, 7), (0, 1))
    for y in (torch.ones(7), one_row, torch.ones(1, 0).expand(5, 0)):
        assert (one_shot_all_reduce_(y, "sum", world()) == world_size).all()
