"""one_shot_all_gather on real CPU processes, bit by bit."""

from __future__ import annotations

import pytest
import torch
from opcommon import DEVICES, assert_fused, gathered, poison, refuses, world
from ranks import on_ranks, run_row
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_all_gather

SHAPES = [(1,), (7,), (3, 5), (2, 3, 129), (0, 4), (4, 0), (1000, 33), (2, 1, 3, 8)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.float8_e4m3fn,
]


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of any number, -1 in all widths and NaNs among them."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 256, (count,), dtype=torch.uint8)
    content[torch.rand(count // 16 + 1).repeat_interleave(16)[:count] < 0.2] = 255
    return content.view(dtype).view(shape)


def bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def wanted(x: Tensor, dim: int) -> Tensor:
    """By torch, which knows nothing of the dtype."""
    every = gathered(bits(x))
    return torch.cat([part.view(x.dtype).view(x.shape) for part in every], dim)


def right(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for dim in (*range(len(shape)), -1):
        poison(rank)
        x = any_bits(shape, dtype)
        want = wanted(x, dim) if x.numel() else None
        y = one_shot_all_gather(x, dim, world())
        if x.numel() and world_size > 1:
            assert_fused()
        sizes = list(shape)
        sizes[dim] *= world_size
        assert list(y.shape) == sizes and y.dtype == dtype and y.is_contiguous()
        assert want is None or torch.equal(bits(y), bits(want)), (shape, dim, dtype)
        assert not x.numel() or y.data_ptr() != x.data_ptr()
        apart = y.new_zeros((*y.shape[:-1], 2 * y.shape[-1]))[..., ::2]
        for out in (torch.zeros_like(y), apart):  # the latter does not lie in one piece
            assert one_shot_all_gather(x, dim, world(), out=out) is out
            assert torch.equal(bits(out), bits(y))
        # x is the part of the result that becomes x.
        out = torch.zeros_like(y)
        own = out.chunk(world_size, dim)[rank] if out.numel() else x
        own.copy_(x)
        assert one_shot_all_gather(own, dim, world(), out=out) is out
        assert torch.equal(bits(out), bits(y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_shot_all_gather(world_size: int, device: str, dtype: torch.dtype) -> None:
    # CPU ranks copy bytes: each shape of each dtype between 1, 2, 3 or 4 of them.
    for shape in SHAPES if device == "cuda" else SHAPES[(world_size + DTYPES.index(dtype)) % 4 :: 4]:
        run_row(right, world_size, shape, dtype, device=device)


@on_ranks(3, device=DEVICES)
def test_any_strides_alignment_and_memory(rank: int, world_size: int) -> None:
    base = torch.randn(9, 11, 6)
    odd = base.bfloat16().view(-1)[1:]  # begins 2 bytes after an aligned address
    for x in (base.transpose(0, 2), base[::2, 1:8:3], base[3, 4], odd, torch.full((1, 3), rank).expand(4, 3)):
        for dim in range(x.dim()):
            assert torch.equal(one_shot_all_gather(x, dim, world()), wanted(x, dim)), x.stride()
    on_heap = symm_mem.empty(13)
    on_heap.fill_(rank)
    from_heap = one_shot_all_gather(on_heap, 0, world()).view(world_size, 13)
    assert from_heap.mT.eq(torch.arange(world_size)).all()
    # What is read must not be overwritten by what arrives.
    memory = torch.randn(5 * world_size)
    for start in (0, 3, 5 * (world_size - 1)):
        part = memory[start : start + 5]
        want = wanted(part, 0)
        assert torch.equal(one_shot_all_gather(part, 0, world(), out=memory), want), start


@on_ranks(2)
def test_results_lie_with_operands_whatever_the_default_device_is(rank: int, world_size: int) -> None:
    x = torch.randn(3, 4)
    want = wanted(x, 0)
    for device in (None, None, "meta", "meta"):
        torch.set_default_device(device)
        try:
            out = one_shot_all_gather(x, 0, world())
        finally:
            torch.set_default_device(None)
        assert torch.equal(out, want), device


@on_ranks(3, device=DEVICES)
def test_a_given_result_takes_no_gradient(rank: int, world_size: int) -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64).requires_grad_()
    out = torch.zeros(4 * world_size, 3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="x: requires a gradient, must not where the result is written"):
        one_shot_all_gather(x, 0, world(), out=out)
    with pytest.raises(ValueError, match="out: requires a gradient"):
        one_shot_all_gather(x.detach(), 0, world(), out=out.requires_grad_())
    with torch.no_grad():
        assert torch.equal(one_shot_all_gather(x, 0, world(), out=out), one_shot_all_gather(x, 0, world()))


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, name, out = torch.randn(4, 3), world().group_name, torch.zeros(8, 3)
    op, into = torch.ops.weft.one_shot_all_gather, torch.ops.weft.one_shot_all_gather_out
    complex_x = torch.zeros(4, dtype=torch.complex64)
    before = last_plan()
    for args, kind, words in [
        ((x[0, 0], 0, name), ValueError, "x: has no dimension, must have 1 or more"),
        ((x, 2, name), ValueError, "gather_dim: is 2, must be from -2 to 1 for a 2-D x"),
        ((complex_x, 0, name), TypeError, "x: is torch.complex64, must be of real numbers"),
        ((x, 0, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op, args, kind, words)
    for args, kind, words in [
        ((out, x, 1, name), ValueError, r"out: has shape \(8, 3\), must have \(4, 6\) for the result"),
        ((out.double(), x, 0, name), TypeError, "out: is torch.float64, must be torch.float32 like x"),
        ((out[:1].expand(8, 3), x, 0, name), ValueError, "out: is expanded, must have memory of its own"),
    ]:
        mode = torch._subclasses.FakeTensorMode()
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        for given in (args, fake):
            with pytest.raises(kind, match=words):
                into(*given)
    with torch.inference_mode():
        made = torch.zeros(8, 3)
    with pytest.raises(ValueError, match="out: is an inference tensor"):
        one_shot_all_gather(x, 0, world(), out=made)
    with pytest.raises(TypeError, match="out: is of type list, must be a tensor"):
        one_shot_all_gather(x, 0, world(), out=[])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gather_dim: is of type bool, must be an integer"):
        one_shot_all_gather(x, True, world())
    with pytest.raises(TypeError, match="x: is of type list, must be a tensor"):
        one_shot_all_gather([1], 0, world(), out=out)  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"
