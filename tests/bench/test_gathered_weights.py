"""The orders that are compared, and the model whose weights are gathered."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[2] / "bench"))


def test_orders_are_options_of_inductor() -> None:
    from suites import gathered_weights
    from torch._inductor import list_options

    known = set(list_options())
    for order in gathered_weights.ORDERS:
        options, fusion = gathered_weights.options_for_order(order)
        assert set(options) <= known
        assert (fusion is None) is (order not in ("weft", "moved", "moved 0.1"))
        if fusion is not None:
            assert fusion.groups == (None if order == "weft" else frozenset())
            assert fusion.reorder == (0.0 if order in ("weft", "moved") else 0.1)


def gradient(rank: int, world: int) -> float:
    """How far a shard's gradient is from that of the whole weight over the ranks' mean."""
    from suites.gathered_weights import shard_weights

    torch.manual_seed(0)
    linear, sharded = nn.Linear(12, 8 * world, bias=False), nn.Linear(12, 8 * world, bias=False)
    sharded.load_state_dict(linear.state_dict())
    shard_weights(sharded, init_device_mesh("cpu", (world,)))
    torch.manual_seed(rank)
    x = torch.randn(5, 12)
    for module in (linear, sharded):
        module(x).square().sum().backward()
    (shard,) = sharded.parameters()
    assert linear.weight.grad is not None and isinstance(shard.grad, DTensor)
    dist.all_reduce(linear.weight.grad)
    mean = linear.weight.grad.chunk(world)[rank] / world
    return float((mean - shard.grad.to_local()).abs().max())


def joined(rank: int, world: int) -> float:
    """How far blocks that gather by one call are from those that have their weights."""
    from suites.gathered_weights import SMALL, GatheredLlama, JoinedLlama, rotary_tables

    torch.manual_seed(0)
    whole = GatheredLlama(SMALL)
    torch.manual_seed(0)
    sharded = JoinedLlama(SMALL)
    x = torch.randn(SMALL.batch, SMALL.seq, SMALL.dim)
    tables = rotary_tables(SMALL, torch.device("cpu"))
    with torch.no_grad():
        return float((whole(x, *tables) - sharded(x, *tables)).abs().max())


def test_a_shard_has_its_part_of_the_mean_gradient() -> None:
    assert max(run_ranks(gradient, 2)) < 1e-5


def test_joined_blocks_compute_what_whole_ones_do() -> None:
    assert max(run_ranks(joined, 2)) < 1e-4
