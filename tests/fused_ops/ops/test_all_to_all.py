"""one_shot_all_to_all on real processes, bit by bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from opcommon import DEVICES, assert_fused, gathered, poison, refuses, world
from ranks import on_ranks, run_row
from test_all_gather import any_bits, bits
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_all_to_all

SHAPES = [(12,), (24, 5), (12, 3, 12), (0, 12), (36, 12, 1), (2, 12, 1, 24)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]


def wanted(x: Tensor, scatter_dim: int, gather_dim: int, rank: int) -> Tensor:
    """By torch, which knows nothing of the dtype."""
    every = [part.view(x.dtype).view(x.shape) for part in gathered(bits(x))]
    return torch.cat([each.chunk(len(every), scatter_dim)[rank] for each in every], gather_dim)


def right(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    dims = range(-1, len(shape))
    for scatter_dim, gather_dim in product(dims, dims):
        if shape[scatter_dim] % world_size:
            continue
        poison(rank)
        x = any_bits(shape, dtype)
        y = one_shot_all_to_all(x, scatter_dim, gather_dim, world())
        sizes = list(shape)
        sizes[scatter_dim] //= world_size
        sizes[gather_dim] *= world_size
        assert list(y.shape) == sizes and y.dtype == dtype and y.is_contiguous()
        if x.numel():
            if world_size > 1:
                assert_fused()
            want = wanted(x, scatter_dim, gather_dim, rank)
            assert torch.equal(bits(y), bits(want)), (shape, dtype, scatter_dim, gather_dim)
            assert y.data_ptr() != x.data_ptr()
            back = one_shot_all_to_all(y, gather_dim, scatter_dim, world())
            assert torch.equal(bits(back), bits(x)), "turned round"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_shot_all_to_all(world_size: int, device: str, dtype: torch.dtype) -> None:
    # CPU ranks copy bytes: each shape of each dtype between some of them.
    for shape in SHAPES if device == "cuda" else SHAPES[(world_size + DTYPES.index(dtype)) % 3 :: 3]:
        run_row(right, world_size, shape, dtype, device=device)


@on_ranks(3, device=DEVICES)
def test_any_strides_alignment_and_memory(rank: int, world_size: int) -> None:
    base = torch.randn(9, 12, 6)
    odd = base.bfloat16().view(-1)[9:]  # begins 18 bytes after an aligned address
    for x in (base.transpose(0, 2), base[::3, 1:10:3], base[3], odd, torch.full((1, 3), rank).expand(6, 3)):
        dims = range(x.dim())
        for scatter_dim, gather_dim in product(dims, dims):
            if x.shape[scatter_dim] % world_size == 0:
                got = one_shot_all_to_all(x, scatter_dim, gather_dim, world())
                assert torch.equal(got, wanted(x, scatter_dim, gather_dim, rank)), x.stride()
    on_heap = symm_mem.empty(6)
    on_heap.fill_(rank)
    from_heap = one_shot_all_to_all(on_heap, 0, 0, world())
    assert from_heap.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, name, op = torch.randn(4, 3), world().group_name, torch.ops.weft.one_shot_all_to_all
    before = last_plan()
    for args, kind, words in [
        ((x[0, 0], 0, 0, name), ValueError, "x: has no dimension, must have 1 or more"),
        ((x, 2, 0, name), ValueError, "scatter_dim: is 2, must be from -2 to 1 for a 2-D x"),
        ((x, 0, -3, name), ValueError, "gather_dim: is -3, must be from -2 to 1 for a 2-D x"),
        ((x, 1, 0, name), ValueError, "scatter_dim: x has size 3 there, must be a multiple of 2 ranks"),
        ((x.to(torch.complex64), 0, 0, name), TypeError, "x: is torch.complex64, must be of real numbers"),
        ((x, 0, 0, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op, args, kind, words)
    with pytest.raises(TypeError, match="gather_dim: is of type bool, must be an integer"):
        one_shot_all_to_all(x, 0, True, world())
    with pytest.raises(TypeError, match="x: is of type list, must be a tensor"):
        one_shot_all_to_all([1], 0, 0, world())  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"
