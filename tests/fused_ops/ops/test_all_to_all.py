"""one_shot_all_to_all on real processes, bit by bit: between CPU ranks, and on GPUs."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
from opcommon import (
    DEVICES,
    assert_fused,
    check,
    compiled_like_eager,
    gather,
    gathered,
    poison,
    refuses,
    world,
)
from ranks import on_ranks, run_ranks, run_row
from test_all_gather import any_bits, bits
from test_collectives_on_gpus import any_words
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_all_to_all
from weft.kernels.device.collective import host_exchange

SHAPES = [(12,), (24, 5), (12, 3, 12), (0, 12), (36, 12, 1), (2, 12, 1, 24)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]


def joined(every: list[Tensor], scatter_dim: int, gather_dim: int, rank: int) -> Tensor:
    return torch.cat([x.chunk(len(every), scatter_dim)[rank] for x in every], gather_dim)


def wanted(x: Tensor, scatter_dim: int, gather_dim: int, rank: int) -> Tensor:
    """By torch, which knows nothing of the dtype."""
    every = [part.view(x.dtype).view(x.shape) for part in gathered(bits(x))]
    return joined(every, scatter_dim, gather_dim, rank)


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


@on_ranks(2, fresh=True)
def test_large_parts_travel_in_chunks(rank: int, world_size: int) -> None:
    host_exchange.CHUNK_BYTES = 1000
    for _ in range(3):
        x = torch.randn(6, 1234)
        assert torch.equal(one_shot_all_to_all(x, 1, 0, world()), wanted(x, 1, 0, rank))


@on_ranks(3, device=DEVICES)
def test_many_calls_with_late_ranks(rank: int, world_size: int) -> None:
    sizes = torch.Generator("cpu").manual_seed(0)
    delays = torch.Generator("cpu").manual_seed(rank)
    to = torch.arange(world_size)[:, None]
    for call in range(300):
        n = int(torch.randint(1, 3000, (1,), generator=sizes, device="cpu"))
        if torch.rand((), generator=delays, device="cpu") < 0.05:
            time.sleep(0.01)
        x = (call + 10 * rank + to).expand(world_size, n).contiguous()
        y = one_shot_all_to_all(x, 0, 1, world()).view(world_size, n)
        assert (y == call + 10 * to + rank).all()


@on_ranks(3, device=DEVICES)
def test_gradients(rank: int, world_size: int) -> None:
    for dtype, (scatter_dim, gather_dim) in product(
        (torch.float32, torch.float64), ((0, 1), (1, 0), (-1, 1), (0, 0))
    ):
        x = torch.randn(6, 3, 3, dtype=dtype).requires_grad_()
        weight = torch.randn_like(one_shot_all_to_all(x, scatter_dim, gather_dim, world()))
        (one_shot_all_to_all(x, scatter_dim, gather_dim, world()) * weight).sum().backward()
        assert x.grad is not None
        want = joined(gather(weight), gather_dim, scatter_dim, rank)
        check("x.grad", x.grad, want, 1e-6)


def compiled(rank: int, world_size: int) -> None:
    group = world()
    compiled_like_eager(
        lambda x: one_shot_all_to_all(x * 2, 1, 0, group) + 1, lambda n: [torch.randn(n, 4)], (7, 4, 12)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device: str) -> None:
    run_row(compiled, 2, device=device)


@on_ranks(2, device=DEVICES)
def test_opcheck(rank: int, world_size: int) -> None:
    op, name = torch.ops.weft.one_shot_all_to_all, world().group_name
    for grad in (False, True):
        x = torch.randn(4, 6, requires_grad=grad)
        torch.library.opcheck(op, (x, 0, 1, name))
        torch.library.opcheck(op, (x.t(), -1, -1, name))
    torch.library.opcheck(op, (torch.arange(6).view(2, 3), 0, 1, name))


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


def late(rank: int, world_size: int) -> str | None:
    x = torch.ones(4)
    one_shot_all_to_all(x, 0, 0, world())
    symm_mem.check()
    symm_mem.set_timeout(0.5)
    if rank == 1:
        return None
    with pytest.raises(symm_mem.PeerTimeout) as error:
        one_shot_all_to_all(x, 0, 0, world())
    return str(error.value)


def test_a_missing_rank_is_an_error_with_a_name() -> None:
    text = run_ranks(late, 2, fresh=True)[0]
    assert text.startswith("one_shot_all_to_all: rank 0") and "waited 0.5 s for rank 1" in text


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda")
def test_every_bit_arrives_on_gpus(rank: int, world_size: int) -> None:
    """By every kernel, at any address; each call on the slow path and on the fast one."""
    generator = torch.Generator("cuda").manual_seed(rank)
    for shape in (
        (4,),
        (12, 5),
        (8, 129, 4),
        (64, 4096),
        (4, 33, 1004),
        (4, 1 << 20),
        (1 << 22,),
        (4, 3, 1000004),
    ):
        words = any_words(torch.Size(shape).numel() + 1, generator)
        for x in (words[1:].view(shape), words[:-1].view(torch.bfloat16).view(*shape[:-1], -1)):
            every = [part.view(x.dtype).view(x.shape) for part in gathered(bits(x))]
            dims = range(x.dim())
            for scatter_dim, gather_dim in product(dims, dims):
                if x.shape[scatter_dim] % world_size:
                    continue
                want = joined(every, scatter_dim, gather_dim, rank)
                for _ in range(2):
                    y = one_shot_all_to_all(x, scatter_dim, gather_dim, world())
                    assert last_plan().algorithm == "push"
                    assert torch.equal(bits(y), bits(want)), (shape, x.dtype, scatter_dim, gather_dim)


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda", fresh=True)
def test_replays_of_graphs_between_eager_calls(rank: int, world_size: int) -> None:
    ranks, graphs = torch.arange(world_size), []

    def fill(x: Tensor, step: int) -> None:
        x.view(world_size, -1).copy_(
            (100 * step + 10 * rank + ranks)[:, None].expand(world_size, len(x) // world_size)
        )

    def wrong(y: Tensor, step: int) -> Tensor:
        return (y.view(world_size, -1) != (100 * step + 10 * ranks + rank)[:, None]).sum()

    for n in (5, 1000, 65_536, 1 << 20):
        x = torch.zeros(world_size * n, dtype=torch.int32)
        one_shot_all_to_all(x, 0, 0, world())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = one_shot_all_to_all(x, 0, 0, world())
        graphs.append((graph, x, y))
    total = torch.zeros((), dtype=torch.int64)
    for step in range(200):
        graph, x, y = graphs[step % len(graphs)]
        fill(x, step)
        graph.replay()
        total += wrong(y, step)
        x = torch.zeros(world_size * (1 + 777 * (step % 50)), dtype=torch.int32)
        fill(x, step)
        total += wrong(one_shot_all_to_all(x, 0, 0, world()), step)
    assert total.item() == 0
    symm_mem.check()
