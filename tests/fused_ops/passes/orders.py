"""Graphs with collectives of their own order, and a machine on which these read and write late."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from graphs import Ranks, copied, traced
from memory_check.verifier import MemoryVerifier
from torch import Tensor, fx
from weft.fused_ops.passes.graph.collectives import communicates, starts
from weft.fused_ops.passes.memory.live_bytes import body
from weft.fused_ops.passes.order.costs import CostTable
from weft.fused_ops.passes.order.grouped import grouped, is_copy
from weft.fused_ops.passes.order.moves import OrderLimits, reorder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
WORLD = 2
ROWS = 256
# A product of [256, 64] and [64, 64] takes 37 us or more, as does a collective of 32 KiB.
TABLE = CostTable(120e3, 5e3, (("weft", 2e3), ("NVLink", 2e3), ("network", 1e3)), 20.0, 2.0, 1.0)
ROOM = OrderLimits(memory=10.0)


def name() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def gathered(x: Tensor, group: str = "") -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, group or name()))


def scattered(x: Tensor, group: str = "") -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", WORLD, group or name()))


def graph_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.Graph:
    graph = traced(fn, *(torch.randn(s) for s in shapes or ((ROWS, 64), (64, 64))))
    graph.eliminate_dead_code()
    return graph


def words(graph: fx.Graph) -> list[str]:
    """The nodes that make something, by name."""
    views = (aten.t.default, aten.view.default, aten.slice.Tensor)
    return [n.name for n in graph.nodes if n.op == "call_function" and n.target not in views]


class LateRanks(Ranks):
    """Collectives that read their operands, and write their results, when they are waited for."""

    def __init__(self) -> None:
        super().__init__(WORLD)
        self.pending: dict[int, tuple[Any, list[Any]]] = {}

    def call(self, target: Any, args: list[Any]) -> list[Any]:
        if target is c10d.wait_tensor.default:
            results = [a[0][0] for a in args]
            if (begun := self.pending.pop(id(results[0]), None)) is not None:
                for result, value in zip(results, super().call(*begun), strict=True):
                    result.copy_(value)
            return results
        if target is c10d.all_reduce_.default:
            given = [a[0][0].clone() for a in args]
            results = [a[0][0].fill_(math.nan) for a in args]
            late = [((g, *a[0][1:]), a[1]) for g, a in zip(given, args, strict=True)]
            self.pending[id(results[0])] = c10d.all_reduce.default, late
            return results
        made = super().call(target, args)
        if getattr(target, "_opname", "").endswith("_coalesced"):
            single = getattr(c10d, target._opname.removesuffix("_coalesced")).default
            results = [[torch.full_like(m, math.nan) for m in each] for each in made]
            for i, result in enumerate(results[0]):
                self.pending[id(result)] = single, [((a[0][0][i], *a[0][1:]), a[1]) for a in args]
            return results
        if getattr(target, "namespace", "") == "_c10d_functional":
            made = [torch.full_like(m, math.nan) for m in made]
            self.pending[id(made[0])] = target, args
        return made


def program(seed: int, most: int = 2, at_once: float = 0.5) -> Callable[..., Any]:
    """Products, sums, writes to parts, and collectives that are waited for now or later.

    Args:
        most: of them are on their way at once.
        at_once: how often one is waited for after what follows it.
    """

    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        rng, values, pending = random.Random(seed), [x, x + 1], []

        def take() -> Tensor:
            return rng.choice(values[-4:])

        def small(t: Tensor) -> Tensor:
            return t[:ROWS] if t.shape[0] >= ROWS else t.repeat(ROWS // t.shape[0], 1)

        for _ in range(rng.randint(12, 30)):
            kind = rng.choice(
                ("mm", "mm", "mm", "sin", "add", "write", "gather", "scatter", "reduce", "in place", "wait")
            )
            v = take()
            if kind == "mm":
                values.append(v @ w)
            elif kind == "sin":
                values.append(v.sin())
            elif kind == "add":
                values.append(small(v) + small(take()))
            elif kind == "write":
                own = v * 1
                own[: rng.randint(1, 9)].mul_(0.5)
                values.append(own)
            elif kind == "in place":
                own = v + 2
                c10d.wait_tensor(c10d.all_reduce_(own[:16], "sum", name()))
                values.append(own)
            elif kind == "wait" and pending:
                values.append(small(c10d.wait_tensor(pending.pop(0))).float())
            elif kind == "gather":
                pending.append(c10d.all_gather_into_tensor(v.to(torch.bfloat16), WORLD, name()))
            elif kind == "scatter":
                pending.append(c10d.reduce_scatter_tensor(small(v), "sum", WORLD, name()))
            else:
                pending.append(c10d.all_reduce(v, "avg", name()))
            if len(pending) > most or (pending and rng.random() < at_once):
                values.append(small(c10d.wait_tensor(pending.pop(0))).float())
        return [*values[-3:], *(c10d.wait_tensor(p) for p in pending)]

    return fn


def order_of(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if communicates(n)]


def check_copied_in(before: fx.Graph, after: fx.Graph) -> int:
    """Between a collective and what stood with it, as casts and cats, is nothing that computes for others. How many
    such copies there are."""
    order, found = body(after), 0
    at = {node.name: i for i, node in enumerate(order)}
    for node, nodes in grouped(body(before)).items():
        if starts(node):
            needed = {order[at[node.name]]}
            for other in reversed(order[min(at[n.name] for n in nodes) : at[node.name]]):
                assert is_copy(other) or needed.intersection(other.users), f"{other} before {node}"
                needed |= {other} if needed.intersection(other.users) else set()
            found += len(nodes) - 1
    return found


def check_alike(before: fx.Graph, *changed: fx.Graph) -> None:
    """All compute the same bits, however late collectives read and write."""
    inputs = Ranks(WORLD).inputs(before)
    wanted = LateRanks().run(before, inputs)
    for after in changed:
        for mine, theirs in zip(LateRanks().run(after, inputs), wanted, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b) and a.isfinite().all()


def measured_peak(graph: fx.Graph, predicted: int) -> int:
    """What a run of the graph holds at most, as predicted."""
    given = [torch.randn(n.meta["val"].shape) for n in graph.nodes if n.op == "placeholder"]
    seen = MemoryVerifier(fx.GraphModule(torch.nn.Module(), graph)).verify(given)
    assert not seen.problems
    assert max(seen.predicted) == predicted
    return max(seen.measured)


def check_random(seed: int) -> int:
    """How often a random program got another order, within two limits of memory: it computes the same. With the larger
    one all ranks vote, and gathers may pass what does not gather."""
    before = graph_of(program(seed))
    found = [_reordered(before, OrderLimits()), _reordered(before, OrderLimits(memory=0.2, voted=None))]
    orders = [after for after in found if after is not None]
    if orders:
        check_alike(before, *orders)
    return len(orders)


def _reordered(before: fx.Graph, limits: OrderLimits) -> fx.Graph | None:
    """The graph in another order; None where its own is kept."""
    after = copied(before)
    change = reorder(after, TABLE, limits)
    after.lint()
    mine, theirs = order_of(after), order_of(before)
    for gathers in (True, False):  # each of both kinds keep theirs
        assert [n for n in mine if ("gather" in n) is gathers] == [
            n for n in theirs if ("gather" in n) is gathers
        ]
    assert mine == theirs or limits.voted is None
    less = change.peak_after < change.peak_before
    assert change.after <= change.before * (1.1 if less else 1)
    assert change.peak_after <= change.peak_before * (1 + limits.memory)
    check_copied_in(before, after)
    if change.kept:
        assert words(after) == words(before)
        return None
    assert measured_peak(after, change.peak_after) <= change.peak_after
    return after
