"""Compiled programs whose weights copy engines gather, and whose gradients they scatter, between CPU ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from memory_check.verified import verified
from opcommon import gathered as by_torch
from ranks import run_ranks
from sharded_weights import GatheredShard
from spelled import group
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from weft.fused_ops import FusionPass

c10d = torch.ops._c10d_functional
WIDTH = 512


def gathered(shard: Tensor) -> Tensor:
    return GatheredShard.apply(shard, torch.float32)


def model(x: Tensor, *weights: Tensor, gather: Callable[[Tensor], Tensor] = gathered) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ gather(w)) + x
    return x


def compiled(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(16, WIDTH, generator=generator)
    shards = [torch.randn(WIDTH // world_size, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(4)]
    whole = [by_torch(s).flatten(0, 1).double().requires_grad_() for s in shards]
    want = model(x.double(), *whole, gather=lambda w: w)
    want.square().sum().backward()
    grads = [by_torch(w.grad).mean(0).chunk(world_size)[rank] for w in whole if w.grad is not None]

    fusion = FusionPass(reorder=True)
    program = torch.compile(model, options=fusion.options)
    with inductor_config.patch(fx_graph_cache=False):  # a graph from there has no report
        with torch.no_grad():
            y, (code,) = run_and_get_code(program, x, *shards)
            for _ in range(3):  # buffers change hands
                assert torch.equal(program(x, *shards), y)
        torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-4)
        # Inductor begins all gathers of such a graph at once, of which copy engines carry two.
        made = re.findall(r"torch\.ops\.weft\.(all_gather_\w+)\.default\(b?", code)
        between = [
            "wait",
            "start",
            "release",
        ]  # a product reads what has come, and the next one is on its way
        assert [op.removeprefix("all_gather_") for op in made] == ["start", *between * 3, "wait", "release"]
        (order,) = fusion.report().orders
        assert order.after < order.before / 3 and order.peak_after <= order.peak_before, order

        leaves = [s.clone().requires_grad_() for s in shards]
        for _ in range(2):
            program(x, *leaves).square().sum().backward()
            for leaf, grad in zip(leaves, grads, strict=True):
                assert leaf.grad is not None
                torch.testing.assert_close(leaf.grad.double(), grad, atol=1e-2, rtol=1e-3)
                leaf.grad = None
    report = fusion.report()
    assert "all_gather by copy engines" in {e.form for e in report.entries} and report.left == 0


def test_weights_and_gradients() -> None:
    run_ranks(verified, 2, compiled)


def split(x: Tensor, *shards: Tensor) -> Tensor:
    """Two weights of a layer in one gather, which is taken apart."""
    for a, b in zip(shards[::2], shards[1::2], strict=True):
        up, down = by_columns(torch.cat([a, b], 1)).split(WIDTH, 1)
        x = torch.tanh(x @ up) @ down
    return x


def by_columns(shard: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, dist.get_world_size(), group()))


def inferred(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    x, shards = torch.randn(15, WIDTH), [torch.randn(WIDTH // world_size, WIDTH) / 20 for _ in range(10)]
    fusion = FusionPass(reorder=True)
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        want = torch.compile(split)(x, *shards)
        torch._dynamo.reset()
        program = torch.compile(split, options=fusion.options)
        for _ in range(3):
            assert torch.equal(program(x, *shards), want)
    (order,) = fusion.report().orders
    assert [p.after > 0 for p in order.placed] == [True, *[False] * 9], order
    assert order.peak_after < order.peak_before


def test_weights_that_are_split() -> None:
    run_ranks(verified, 2, inferred)


def differing(rank: int, world_size: int) -> int:
    """Rank 0 alone reads all that was gathered, so its gather stays joined."""

    def fn(x: Tensor, *shards: Tensor) -> Tensor:
        whole = by_columns(torch.cat(shards, 1))
        up, down = whole.split(WIDTH, 1)
        y = torch.tanh(x @ up) @ down
        return y + whole.sum() if rank == 0 else y

    torch.manual_seed(rank)
    x, shards = torch.randn(15, WIDTH), [torch.randn(WIDTH // world_size, WIDTH) / 20 for _ in range(2)]
    fusion = FusionPass(reorder=True)
    with torch.no_grad():
        program = torch.compile(fn, options=fusion.options)
        for _ in range(2):
            torch.testing.assert_close(program(x, *shards), fn(x, *shards), atol=1e-3, rtol=1e-3)
    return len(fusion.report().disagreements)


def test_a_rank_that_takes_nothing_apart() -> None:
    """Both run their graphs as they were."""
    assert all(run_ranks(differing, 2))


def narrow(x: Tensor, *shards: Tensor, gather: Callable[[Tensor], Tensor] = by_columns) -> Tensor:
    for shard in shards:
        x = torch.tanh(x @ gather(shard).to(x.dtype) / 8).repeat(1, 4)
    return x


def in_fp8(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    x = torch.randn(16, 4 * WIDTH)
    shards = [torch.randn(4 * WIDTH // world_size, WIDTH).to(torch.float8_e4m3fn) for _ in range(3)]
    want = narrow(x.double(), *shards, gather=lambda t: by_torch(t.float()).flatten(0, 1))
    fusion = FusionPass(reorder=True)
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        got = torch.compile(narrow, options=fusion.options)(x, *shards)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    assert [e.form for e in fusion.report().entries] == ["all_gather by copy engines"] * 3


def test_weights_that_are_sent_in_fp8() -> None:
    run_ranks(verified, 2, in_fp8)
