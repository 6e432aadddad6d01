"""All-gathers, reduce-scatters and all-to-alls on CUDA: all kernels, any bits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from opcommon import gathered, world
from ranks import on_ranks
from test_all_gather import bits
from torch import Tensor
from weft import fused_ops
from weft.kernels.all_gather.cuda_kernel import all_gather_program
from weft.kernels.all_reduce.cuda_kernel import all_reduce_program
from weft.kernels.all_to_all.cuda_kernel import all_to_all_program
from weft.kernels.device.comm.ll_exchange import in_turn
from weft.kernels.reduce_scatter.cuda_kernel import reduce_scatter_program
from weft.symm_mem.heap.registry import get_heap

pytestmark = pytest.mark.gpu


def any_words(numel: int, generator: torch.Generator) -> Tensor:
    """Of all bits; many of the two that a correction tells apart."""
    words = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator, device="cuda").int()
    return torch.where(words % 16 == 0, -1 - (words >> 4) % 2, words)


@on_ranks([2, 4], device="cuda")
def test_every_bit_arrives(rank: int, world_size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rank)
    for shape in (
        (1,),
        (3, 5),
        (7, 129),
        (64, 4096),
        (5, 33, 1001),
        (3, 1 << 20),
        (1 << 22,),
        (6 << 20,),
        (2, 3, 1000003),
    ):
        words = any_words(torch.Size(shape).numel(), generator).view(shape)
        for x in (words, words.view(torch.bfloat16), words.view(torch.uint8)):
            stacked = [torch.empty_like(words) for _ in range(world_size)]
            dist.all_gather(stacked, words)
            parts = [part.view(x.dtype) for part in stacked]
            for dim in range(x.dim()):
                y = fused_ops.one_shot_all_gather(x, dim, world())
                assert fused_ops.last_plan().algorithm == "push"
                assert torch.equal(bits(y), bits(torch.cat(parts, dim))), (shape, x.dtype, dim)
                out = torch.zeros_like(y)
                for _ in range(2):  # on the slow path and on the fast one
                    fused_ops.one_shot_all_gather(x, dim, world(), out=out.zero_())
                    assert torch.equal(out.view(torch.uint8), y.view(torch.uint8))
            out = torch.zeros(world_size * x.shape[0], *x.shape[1:], dtype=x.dtype)
            own = out.chunk(world_size)[rank].copy_(x)
            fused_ops.one_shot_all_gather(own, 0, world(), out=out)
            assert torch.equal(out.view(torch.uint8), torch.cat(parts).view(torch.uint8)), "in place"


@on_ranks([2, 4], device="cuda")
def test_reduce_scatters_give_the_bits_of_all_reduces(rank: int, world_size: int) -> None:
    """Those of the all-reduce, from every kernel, at any address."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((4, 3, 8), (12, 129, 4), (64, 12, 4096), (3, 12, 100_003), (12 << 20,), (24, 1 << 20)):
            memory = torch.randn(torch.Size(shape).numel() + 1).to(dtype)
            for x in (memory[:-1].view(shape), memory[1:].view(shape)):
                total = fused_ops.one_shot_all_reduce(x, "avg", world())
                for dim in (d for d in range(x.dim()) if shape[d] % world_size == 0):
                    part = total.chunk(world_size, dim)[rank]
                    y = fused_ops.one_shot_reduce_scatter(x, "avg", dim, world())
                    assert fused_ops.last_plan().algorithm == "push"
                    assert torch.equal(y, part), (shape, dtype, dim)
                    out = torch.zeros_like(y)
                    for _ in range(2):
                        fused_ops.one_shot_reduce_scatter(x, "avg", dim, world(), out=out.zero_())
                        assert torch.equal(out, part)


@on_ranks([2, 4], device="cuda")
def test_every_bit_arrives_where_it_is_exchanged(rank: int, world_size: int) -> None:
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
                want = torch.cat([x.chunk(len(every), scatter_dim)[rank] for x in every], gather_dim)
                for _ in range(2):
                    y = fused_ops.one_shot_all_to_all(x, scatter_dim, gather_dim, world())
                    assert fused_ops.last_plan().algorithm == "push"
                    assert torch.equal(bits(y), bits(want)), (shape, x.dtype, scatter_dim, gather_dim)


@on_ranks([3, 4], device="cuda")
def test_one_peer_after_the_other_as_over_pcie(rank: int, world_size: int) -> None:
    group = dist.new_group()
    get_heap(group).backend.over_pcie = True
    programs = (
        all_gather_program(world_size, rank),
        all_to_all_program(world_size, rank),
        all_reduce_program(world_size, rank, torch.float32, "sum"),
        reduce_scatter_program(world_size, rank, torch.float32, "sum"),
    )
    before = [len(in_turn(program)._functions) for program in programs]
    for n in (4, 31, 4096, 1 << 20):
        x = torch.randn(world_size, n)
        everyones = list(gathered(x))
        total = sum(everyones[1:], everyones[0])
        assert torch.equal(fused_ops.one_shot_all_reduce(x, "sum", group), total), n
        assert torch.equal(fused_ops.one_shot_all_gather(x, 0, group), torch.cat(everyones)), n
        assert torch.equal(fused_ops.one_shot_reduce_scatter(x, "sum", 0, group)[0], total[rank]), n
        exchanged = torch.stack([each[rank] for each in everyones])
        assert torch.equal(fused_ops.one_shot_all_to_all(x, 0, 0, group), exchanged), n
        assert fused_ops.last_plan().algorithm == "push"
    assert all(len(in_turn(p)._functions) > b for p, b in zip(programs, before, strict=True))
