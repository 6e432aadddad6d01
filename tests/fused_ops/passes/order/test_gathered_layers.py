"""Layers whose weights are gathered in the graph, several in one tensor: one gather is exposed, one is ahead."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import orders
import pytest
import torch
from graphs import captured, copied
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from weft.fused_ops import FusionPass
from weft.fused_ops.passes import OrderChange
from weft.fused_ops.passes.memory.live_bytes import body
from weft.fused_ops.passes.order.grouped import grouped
from weft.fused_ops.passes.order.moves import OrderLimits, reorder

c10d, weft_ops = torch.ops._c10d_functional, torch.ops.weft
D = 1024
CALLS = r"^ +(?:buf\d+ = )?(?:extern_kernels|torch\.ops\._c10d_functional)\.(\w+)|^ +(cpp_fused\w*)\("
WHOLE = 2 * D * D * 2  # bytes of a layer's two weights in bfloat16
pytestmark = pytest.mark.usefixtures("two")


def by_columns(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    whole = orders.gathered(torch.cat([a.to(torch.bfloat16), b.to(torch.bfloat16)], 1))
    return whole.split(a.shape[1], 1)


def by_rank(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    flat = torch.cat([t.to(torch.bfloat16).reshape(-1) for t in (a, b)])
    whole = orders.gathered(flat).view(orders.WORLD, -1)
    return tuple(part.reshape(-1, a.shape[1]) for part in whole.split(a.numel(), 1))


def by_halves(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Of each weight a half."""
    return tuple(orders.gathered(t.to(torch.bfloat16)).split(D // 2, dim)[0] for dim, t in ((1, a), (0, b)))


class Sharded(torch.autograd.Function):
    """Its gradients are scattered together."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(w.clone() for w in by_rank(a, b))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        flat = torch.cat([g.reshape(orders.WORLD, -1) for g in grads], 1).reshape(-1)
        parts = orders.scattered(flat).float().chunk(2)
        return tuple(p.view(-1, g.shape[1]) for p, g in zip(parts, grads, strict=True))


def layers(x: Tensor, shards: list[Tensor], whole: Callable[..., Any]) -> Tensor:
    for a, b in zip(shards[::2], shards[1::2], strict=True):
        up, down = whole(a, b)
        x = (x @ up).relu() @ down
    return x


def changed(
    count: int, whole: Callable[..., Any], *, train: bool = False, dynamic: bool = False, **settings: Any
) -> list[tuple[fx.Graph, OrderChange]]:
    x = torch.randn(512, D, dtype=torch.bfloat16)
    shards = [torch.randn(D // orders.WORLD, D, requires_grad=train) for _ in range(2 * count)]
    fusion = FusionPass(agree=False, **settings)
    with torch.set_grad_enabled(train):
        seen = captured(
            lambda x, *shards: layers(x, [*shards], whole),
            *(x, *shards),
            fusion=fusion,
            dynamic=dynamic,
            runs=False,
        )
    return list(zip((s.after for s in seen), fusion.report().orders, strict=True))


def exposed(change: OrderChange) -> list[bool]:
    return [p.after > 0 for p in change.placed]


def most_on_heap(graph: fx.Graph) -> int:
    """Gathers that are on the heap at once, from their starts to their releases."""
    starts, ends = weft_ops.all_gather_start.default, weft_ops.all_gather_release.default
    there = most = 0
    for node in graph.nodes:
        there += (node.target is starts) - (node.target is ends)
        most = max(most, there)
    assert there == 0, "each is released"
    return most


@pytest.mark.parametrize("whole", [by_columns, by_rank])
def test_one_gather_of_sixteen_is_exposed_in_inference(whole: Callable[..., Any]) -> None:
    """By copy engines, each weight by itself: two are on the heap, and no layer's are in torch's memory."""
    ((graph, change),) = changed(16, whole, reorder=True)
    assert exposed(change) == [True, *[False] * 31]
    assert change.before == pytest.approx(32 * change.after)
    assert most_on_heap(graph) == 2
    ((_, few),) = changed(4, whole, reorder=True)
    assert change.peak_after == few.peak_after < change.peak_before
    assert change.peak_after < WHOLE


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backend_holds_one_layer_and_the_next_one(dynamic: bool) -> None:
    settings = {"groups": [], "dynamic": dynamic}
    ((_, plain),) = changed(8, by_columns, reorder=True, **settings)
    ((_, ahead),) = changed(8, by_columns, reorder=1.0, **settings)
    assert exposed(ahead) == [True, *[False] * 7]
    assert plain.peak_before == ahead.peak_before > 8 * WHOLE
    assert plain.peak_after < 2 * WHOLE < ahead.peak_after <= 2 * plain.peak_after


def test_training() -> None:
    forward, backward = (c for _, c in changed(6, Sharded.apply, train=True, reorder=1.0, groups=[]))
    assert exposed(forward) == [True, *[False] * 5]
    assert sum(exposed(backward)) == 1  # of the scatters: after the last one there is no product
    for change in (forward, backward):
        assert change.peak_after <= 2 * change.peak_before


def test_training_by_copy_engines() -> None:
    """The gathers of both weights of a layer; their gradients are scattered inside of the products."""
    (_, forward), (graph, _) = changed(6, Sharded.apply, train=True, reorder=True)
    assert exposed(forward) == [True, *[False] * 11]
    assert forward.peak_after <= forward.peak_before
    assert (
        len(graph.find_nodes(op="call_function", target=weft_ops.fused_matmul_reduce_scatter.default)) == 12
    )


@pytest.mark.parametrize("whole", [Sharded.apply, by_columns])
def test_copy_ins_are_loops_of_their_own(whole: Callable[..., Any]) -> None:
    """Not fused with what another layer computes, for which the collective would wait."""
    x, shards = torch.randn(32, 64), [torch.randn(32, 64, requires_grad=True) for _ in range(6)]
    fusion = FusionPass([], agree=False, reorder=1.0)

    def fn(x: Tensor, *shards: Tensor) -> Tensor:
        return layers(x.to(torch.bfloat16), [*shards], whole).float().sum()

    def step() -> None:
        loss = torch.compile(fn, options=fusion.options)(x, *shards)
        if whole is not by_columns:
            loss.backward()

    torch._dynamo.reset()
    trains = torch.set_grad_enabled(whole is not by_columns)
    with trains, inductor_config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(step)
    for code, kind in zip(codes, ("all_gather_into_tensor", "reduce_scatter_tensor"), strict=False):
        found = re.findall(CALLS, code, re.MULTILINE)
        order = [a or b for a, b in found]
        copied_in = [order[i - 1] for i, called in enumerate(order) if called == kind]
        assert len(copied_in) == 3 and all(re.match("cpp_fused.*(cat|_to_copy)", each) for each in copied_in)
        for kernel in copied_in:  # what stands next to each other is one kernel, but has loops of its own
            source = code.split(f"{kernel} = ", 1)[1].split("'''")[1]
            outputs = set(re.findall(r"\w+\* out_ptr\d+", source))
            assert len(outputs) == source.count("for(int64_t x0="), source


def test_what_is_split_is_released_after_its_last_part_was_read() -> None:
    ((graph, _),) = changed(2, by_halves, reorder=True)
    at = {n: i for i, n in enumerate(graph.nodes)}
    for release in graph.find_nodes(op="call_function", target=weft_ops.all_gather_release.default):
        (split,) = (u for u in release.args[1].users if u is not release)
        assert max(at[product] for part in split.users for product in part.users) < at[release]


def test_what_stays_together() -> None:
    """What is computed is no part of a copy-in, nor a copy before it, nor what reads more than the wait."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        early = x.sum(0).to(torch.bfloat16)
        late = (x.t() @ x).to(torch.bfloat16)
        whole = orders.gathered(torch.cat([early, late.reshape(-1), w.to(torch.bfloat16).reshape(-1)]))
        a, b = whole.split([64, whole.numel() - 64])
        return a.float() + 1, b.float(), torch.cat([a, early]), late * 2

    nodes = body(orders.graph_of(fn))
    ((start, before), (wait, after)) = grouped(nodes).items()
    assert [n.name for n in before] == ["view", "_to_copy_2", "view_1", "cat", start.name]
    assert [n.name for n in after] == [wait.name, "split_with_sizes", "getitem", "getitem_1", "_to_copy_3"]


def program(seed: int) -> Callable[..., Any]:
    """Layers of weights that are gathered some at a time, early or late, by one call or split, with reductions."""

    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        rng, kept, ready = random.Random(seed), [], []
        for i in range(rng.randint(3, 7)):
            if not ready:  # of one or more layers, as torch puts them in front
                for _ in range(rng.randint(1, 3)):
                    a, b = (w[: w.shape[0] // orders.WORLD] * (i + k) for k in (1, 2))
                    parts = by_columns(a, b) if rng.random() < 0.5 else by_rank(a, b)
                    ready.append([p.float() for p in parts])
            up, down = ready.pop(0)
            if rng.random() < 0.3:
                up = up.clone().mul_(0.5)
            h = (x @ up / 8).relu()
            x = x + h @ down / 8
            if rng.random() < 0.5:
                kept.append(orders.scattered(torch.cat([h, x], 1)) * 0.5)
            if rng.random() < 0.3:
                x = x + c10d.wait_tensor(c10d.all_reduce(h, "avg", orders.name()))
        return [x, *kept]

    return fn


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 100), marks=pytest.mark.slow)], ids=str)
def test_random_layers(seeds: range) -> None:
    """Two orders of each: they compute the same bits, however late collectives are, and need what was predicted."""
    other = 0
    for seed in seeds:
        before = orders.graph_of(program(seed))
        found = []
        for memory in (0.0, 0.5):
            after = copied(before)
            change = reorder(after, orders.TABLE, OrderLimits(memory=memory))
            after.lint()
            assert orders.order_of(after) == orders.order_of(before)
            orders.check_copied_in(before, after)
            assert change.peak_after <= change.peak_before * (1 + memory)
            assert orders.measured_peak(after, change.peak_after) <= change.peak_after
            if not change.kept:
                found.append(after)
        if found:
            orders.check_alike(before, *found)
        other += len(found)
    assert other > len(seeds) // 2, other
