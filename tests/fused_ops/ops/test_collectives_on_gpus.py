"""All-gathers and reduce-scatters on CUDA: all kernels, any bits, late ranks, eager calls between replays of graphs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from opcommon import world
from ranks import on_ranks
from test_all_reduce_on_gpus import late
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_all_gather, one_shot_all_reduce, one_shot_reduce_scatter

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
                y = one_shot_all_gather(x, dim, world())
                assert last_plan().algorithm == "push"
                bits = (torch.cat(parts, dim).view(torch.uint8), y.view(torch.uint8))
                assert torch.equal(*bits), (shape, x.dtype, dim)
                out = torch.zeros_like(y)
                for _ in range(2):  # on the slow path and on the fast one
                    one_shot_all_gather(x, dim, world(), out=out.zero_())
                    assert torch.equal(out.view(torch.uint8), y.view(torch.uint8))
            out = torch.zeros(world_size * x.shape[0], *x.shape[1:], dtype=x.dtype)
            own = out.chunk(world_size)[rank].copy_(x)
            one_shot_all_gather(own, 0, world(), out=out)
            assert torch.equal(out.view(torch.uint8), torch.cat(parts).view(torch.uint8)), "in place"


@on_ranks([2, 4], device="cuda")
def test_reduce_scatters_give_the_bits_of_all_reduces(rank: int, world_size: int) -> None:
    """Those of the all-reduce, from every kernel, at any address."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((4, 3, 8), (12, 129, 4), (64, 12, 4096), (3, 12, 100_003), (12 << 20,), (24, 1 << 20)):
            memory = torch.randn(torch.Size(shape).numel() + 1).to(dtype)
            for x in (memory[:-1].view(shape), memory[1:].view(shape)):
                total = one_shot_all_reduce(x, "avg", world())
                for dim in (d for d in range(x.dim()) if shape[d] % world_size == 0):
                    part = total.chunk(world_size, dim)[rank]
                    y = one_shot_reduce_scatter(x, "avg", dim, world())
                    assert last_plan().algorithm == "push"
                    assert torch.equal(y, part), (shape, dtype, dim)
                    out = torch.zeros_like(y)
                    for _ in range(2):
                        one_shot_reduce_scatter(x, "avg", dim, world(), out=out.zero_())
                        assert torch.equal(out, part)


@on_ranks([2, 4], device="cuda", fresh=True)
def test_eager_calls_between_replays(rank: int, world_size: int) -> None:
    order, delays = random.Random(0), random.Random(rank)
    ranks = torch.arange(world_size)

    def call(step: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The input that fits, and both results."""
        x = torch.empty(n, dtype=torch.int32)
        parts = torch.empty(world_size * n, dtype=torch.bfloat16)
        fill(x, parts, step)
        return x, parts, torch.stack([wrong(*run(x, parts), step)])

    def fill(x: Tensor, parts: Tensor, step: int) -> None:
        x.fill_(step - 1000 * rank)
        parts.copy_((ranks + rank + step % 7).repeat_interleave(x.numel()))

    def run(x: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        return one_shot_all_gather(x, 0, world()), one_shot_reduce_scatter(parts, "sum", 0, world())

    def wrong(gathered: Tensor, part: Tensor, step: int) -> Tensor:
        bad = (gathered.view(world_size, -1) != (step - 1000 * ranks)[:, None]).sum()
        return bad + (part != world_size * (rank + step % 7) + sum(range(world_size))).sum()

    sizes = [order.choice((5, 1000, 4096, 65_536, 1 << 20, 3 << 20)) for _ in range(6)]
    graphs = []
    for n in sizes:
        x, parts, _ = call(0, n)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = run(x, parts)
        graphs.append((graph, x, parts, outs))
    total = torch.zeros((), dtype=torch.int64)
    for step in range(1500):
        late(delays)
        if order.random() < 0.5:
            graph, x, parts, outs = order.choice(graphs)
            fill(x, parts, step)
            late(delays)
            graph.replay()
            total += wrong(*outs, step)
        else:
            total += call(step, order.choice((1, 7, 999, 4096, 50_000, 2 << 20)))[2].sum()
    assert total.item() == 0
    symm_mem.check()
