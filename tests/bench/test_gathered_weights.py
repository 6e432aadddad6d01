"""The orders that are compared, and the model whose weights are gathered."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "bench"))


def test_orders_are_options_of_inductor() -> None:
    from suites import gathered_weights
    from torch._inductor import list_options

    known = set(list_options())
    for order in gathered_weights.ORDERS:
        options, fusion = gathered_weights.options_for_order(order)
        assert set(options) <= known
        assert (fusion is None) is (order not in ("weft", "moved", "moved 0.1", "buckets"))
        if fusion is not None:
            assert fusion.groups == (None if order == "weft" else frozenset())
            assert fusion.reorder == (0.0 if order in ("weft", "moved") else 0.1)
            assert (fusion.buckets > 0) is (order == "buckets")


def gradient(rank: int, world: int) -> float:
    """How far a shard's gradient is from that of the whole weight over the ranks' mean."""
    from suites.gathered_weights import ShardedLinear

    torch.manual_seed(0)
    linear = nn.Linear(12, 8 * world, bias=False)
    sharded = ShardedLinear(linear)
    torch.manual_seed(rank)
    x = torch.randn(5, 12)
    for module in (linear, sharded):
        module(x).square().sum().backward()
    whole, shard = linear.weight.grad, sharded.shard.grad
    assert whole is not None and shard is not None
    dist.all_reduce(whole)
    return float((whole.chunk(world)[rank] / world - shard).abs().max())


def test_a_shard_has_its_part_of_the_mean_gradient() -> None:
    assert max(run_ranks(gradient, 2)) < 1e-5
