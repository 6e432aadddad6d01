"""Small collectives become one call: nothing is copied, nothing else changes, and no byte more is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import copied
from orders import (
    TABLE,
    c10d,
    check_alike,
    gathered,
    graph_of,
    most_on_their_way,
    name,
    scattered,
    words,
)
from torch import Tensor, fx
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.graph.collectives import kind_of
from weft.fused_ops.passes.order.buckets import Bucket, fill_buckets
from weft.fused_ops.passes.order.moves import OrderEstimate

ALL = 1 << 30
pytestmark = pytest.mark.usefixtures("two")


def layers(x: Tensor, w: Tensor) -> Tensor:
    for shard in w.chunk(4):
        y = gathered(shard.to(torch.bfloat16)).float()
        x = (x[:, :32] @ y).repeat(1, 1)
    return x


def filled(
    fn: Callable[..., Any], size: int = ALL, memory: float = 10.0, voted: Any = None
) -> tuple[fx.Graph, tuple[Bucket, ...]]:
    """The graph with buckets; what it computes is what it did."""
    before = graph_of(fn)
    after = copied(before)
    peak = OrderEstimate.of(before, TABLE).peak
    buckets, crossed = fill_buckets(after, size, memory, voted)
    after.lint()
    assert bool(buckets) == bool(crossed)
    assert OrderEstimate.of(after, TABLE).peak <= peak * (1 + memory)
    check_alike(before, after)
    return after, buckets


def kinds(graph: fx.Graph) -> list[str]:
    return [kind_of(n) for n in graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]


def copying(graph: fx.Graph) -> list[str]:
    """All but the collectives, and what takes one tensor of several."""
    return sorted(w for w in words(graph) if not w.startswith(("all_gather", "getitem")))


def test_gathers_of_weights_are_one_call_and_copy_nothing() -> None:
    graph, (bucket,) = filled(layers)
    assert kinds(graph) == ["all_gather_into_tensor_coalesced", *["wait_tensor"] * 4]
    assert copying(graph) == copying(graph_of(layers))
    assert bucket.of == ("all_gather_into_tensor", *(f"all_gather_into_tensor_{i}" for i in (1, 2, 3)))
    assert bucket.size == 4 * 2 * 16 * 64 * 2
    assert "4 in a bucket of 16384 bytes" in str(bucket)


def test_a_bucket_has_so_many_bytes_at_most() -> None:
    one = 2 * 16 * 64 * 2
    for size, count in [(one, 0), (one + 1, 0), (2 * one, 2), (3 * one + 1, 1), (4 * one, 1)]:
        _, buckets = filled(layers, size)
        assert len(buckets) == count
        assert all(len(b.of) * one == b.size <= size for b in buckets)


def test_gradients_are_scattered_together_with_what_scales_them() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = scattered(x @ w) * 0.5
        b = scattered(x @ w.t()) * 0.25
        return a, b

    graph, (bucket,) = filled(fn)
    assert kinds(graph) == ["reduce_scatter_tensor_coalesced", "wait_tensor", "wait_tensor"]
    assert bucket.of == ("reduce_scatter_tensor", "reduce_scatter_tensor_1")


def test_reductions_over_all_ranks() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a = c10d.wait_tensor(c10d.all_reduce(x.sum(0), "sum", name()))
        b = c10d.wait_tensor(c10d.all_reduce(w.sum(1), "sum", name()))
        c = c10d.wait_tensor(c10d.all_reduce(w.sum(0), "max", name()))
        return a + b + c

    graph, _ = filled(fn)
    assert kinds(graph)[0] == "all_reduce_coalesced"
    assert kinds(graph).count("all_reduce") == 1  # another reduction


def test_other_classes_stay_apart() -> None:
    other = dist.new_group([0, 1]).group_name

    def fn(x: Tensor, w: Tensor) -> Tensor:
        total = gathered(w).sum() + gathered(w, other).sum()
        return total + gathered(w.to(torch.bfloat16)).float().sum()

    assert not filled(fn)[1]


def test_only_groups_that_vote() -> None:
    assert not filled(layers, voted=())[1]
    assert not filled(layers, voted={"another"})[1]
    assert filled(layers, voted={name()})[1]


def test_what_needs_the_other_stays_after_it() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a = gathered(w)
        return gathered(a[:64].sin()).sum()

    assert not filled(fn)[1]


def test_what_a_product_separates_stays_apart() -> None:
    """A gather of what is computed, after a product of the one before."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        a = gathered(w)[:64]
        return gathered(x @ a @ w).sum()

    assert not filled(fn)[1]


def test_not_a_byte_more() -> None:
    """The second gather is large, and would be there beside the first product."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ gathered(w)[:64]
        y = y.sum(0, keepdim=True)
        z = gathered(w.t().contiguous())
        return y @ z[:64]

    assert not filled(fn, memory=0.0)[1]
    assert filled(fn, memory=1.0)[1]


def test_what_writes_to_an_operand_stays_where_it_is() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a = w + 1
        first = gathered(a)
        a.mul_(2)
        return first.sum() + gathered(a).sum()

    assert not filled(fn)[1]


def test_the_pass_puts_into_buckets_and_says_so() -> None:
    graph = graph_of(layers)
    fusion = FusionPass([], buckets=True, reorder=1.0, agree=False)
    fusion(graph)
    (change,) = fusion.report().orders
    assert [len(b.of) for b in change.buckets] == [4]
    assert change.after < change.before and change.peak_after <= 2 * change.peak_before
    said = "4 in a bucket of 16384 bytes: all_gather_into_tensor, all_gather_into_tensor_1"
    assert said in fusion.report().details()
    fusion = FusionPass([], buckets=4096, agree=False)
    fusion(graph_of(layers))
    assert "order kept: no collectives go into one bucket" in fusion.report().details()


def test_two_gathers_are_on_their_way_where_asked_for() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        for shard in w.chunk(4):
            x = x[:, :32] @ gathered(shard).repeat(1, 1)
        return x

    most = {}
    for gathers in (1, 2, 3):
        graph = graph_of(fn)
        FusionPass([], reorder=9.0, agree=False, gathers=gathers)(graph)
        most[gathers] = most_on_their_way(graph)
    assert most[1] == 1 < most[2] <= 2
    assert most[3] <= 3
