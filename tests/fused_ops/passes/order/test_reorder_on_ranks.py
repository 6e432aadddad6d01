"""Compiled programs whose collectives were moved: what ranks compute, and what Inductor makes of the order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from memory_check.verified import verified
from ranks import run_ranks
from sharded_weights import model
from spelled import group
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from weft.fused_ops import FusionPass, Report
from weft.fused_ops.passes.graph.collectives import communicates, waits
from weft.fused_ops.passes.order.costs import counted_flops

c10d = torch.ops._c10d_functional
LAYERS = 3


def operands(rank: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(rank)
    shards = [torch.randn(64, 128) / 12 for _ in range(LAYERS)]
    return torch.randn(256, 128) / 12, [s.requires_grad_() for s in shards]


def kernels(graph: fx.Graph) -> list[str]:
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    found = [n for n in nodes if communicates(n) or waits(n) or counted_flops(n)]
    return [n.target._opname for n in found if n.target.namespace != "weft"]


def collectives(graph: fx.Graph) -> list[str]:
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    return [n.target._opname for n in nodes if communicates(n) or waits(n)]


@contextmanager
def passed(names: Callable[[fx.Graph], list[str]] = kernels) -> Iterator[list[list[str]]]:
    """What is in each graph that a pass has gone over, compiled anew."""
    graphs: list[list[str]] = []
    as_always = FusionPass.__call__

    def call(self: FusionPass, graph: fx.Graph) -> None:
        as_always(self, graph)
        graphs.append(names(graph))

    with patch.object(FusionPass, "__call__", call), inductor_config.patch(fx_graph_cache=False):
        yield graphs


def called(code: str) -> list[str]:
    """The kernels that generated code calls, in order."""
    found = re.findall(r"(?:extern_kernels|torch\.ops\._c10d_functional)\.(\w+)(?:\.default)?\(", code)
    return [name.removesuffix("_") for name in found]


def trained(
    rank: int, world: int, reorder: float | bool
) -> tuple[list[Tensor], Report, list[tuple[list[str], list[str]]]]:
    x, shards = operands(rank)
    fusion = FusionPass([], reorder=reorder)  # fuses nothing
    torch._dynamo.reset()
    with passed() as graphs:
        compiled = torch.compile(model, options=fusion.options)

        def step() -> Tensor:
            y = compiled(x, shards)
            y.square().sum().backward()
            return y

        y, codes = run_and_get_code(step)
    grads = [s.grad for s in shards if s.grad is not None]
    return [y.detach(), *grads], fusion.report(), list(zip(graphs, map(called, codes), strict=True))


def both(rank: int, world: int) -> tuple[Report, list[tuple[list[str], list[str]]]]:
    plain, report, _ = trained(rank, world, False)
    assert not report.orders
    results, report, orders = trained(rank, world, 0.5)
    for a, b in zip(results, plain, strict=True):
        assert torch.equal(a, b)
    return report, orders


def test_training_with_gathered_weights() -> None:
    ranks = run_ranks(verified, 2, both)
    for report, orders in ranks:
        for graph, code in orders:
            assert graph == code  # Inductor keeps it, though it orders kernels for peak memory
        forward, backward = (graph for graph, _ in orders)
        gathers = [i for i, name in enumerate(forward) if name == "all_gather_into_tensor"]
        arrivals = [i for i, name in enumerate(forward) if name == "wait_tensor"]
        assert len(gathers) == len(arrivals) == LAYERS
        for start, wait in zip(gathers[1:], arrivals[1:], strict=True):
            assert "mm" in forward[start:wait]
        scatters = [i for i, name in enumerate(backward) if name == "reduce_scatter_tensor"]
        assert sum("mm" in backward[i : i + 2] for i in scatters) >= LAYERS - 1
        assert [o.graph for o in report.orders] == [0, 1]
        assert all(o.after < o.before and not o.kept for o in report.orders)
        assert "exposed" in report.details() and "kernel earlier" in report.details()
    assert ranks[0][1] == ranks[1][1]


def inferred(rank: int, world: int) -> list[tuple[list[str], list[str]]]:
    """Weights that are large beside what they multiply: Inductor would hold one at a time."""

    def fn(x: Tensor, shards: list[Tensor]) -> Tensor:
        for shard in shards:
            w = c10d.wait_tensor(c10d.all_gather_into_tensor(shard.to(torch.bfloat16), 2, group()))
            x = (x @ w.t()).relu() @ w
        return x

    torch.manual_seed(rank)
    x = (torch.randn(64, 256) / 16).to(torch.bfloat16)
    shards = [torch.randn(1024, 256) / 32 for _ in range(4)]
    torch._dynamo.reset()
    options = FusionPass([], reorder=2.0).options
    with torch.no_grad(), passed() as graphs:
        y, codes = run_and_get_code(torch.compile(fn, options=options), x, shards)
    torch.testing.assert_close(y, fn(x, shards))
    return list(zip(graphs, map(called, codes), strict=True))


def test_inductor_keeps_the_order_where_it_would_have_another() -> None:
    for orders in run_ranks(verified, 2, inferred):
        ((graph, code),) = orders
        assert graph == code
        assert "all_gather_into_tensor mm wait_tensor" in " ".join(graph)


def differing(rank: int, world: int) -> tuple[int, int]:
    """One rank moves nothing: the order of collectives is the same, so ranks need not agree on it."""
    x, shards = operands(rank)
    fusion = FusionPass([], reorder=0.5 if rank else False)
    compiled = torch.compile(model, options=fusion.options)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False):
        y = compiled(x, shards)
    torch.testing.assert_close(y, model(x, shards), rtol=2e-2, atol=2e-2)
    return len(fusion.report().orders), len(fusion.report().disagreements)


def test_a_rank_that_moves_nothing_beside_one_that_does() -> None:
    assert run_ranks(verified, 2, differing) == [(0, 0), (1, 0)]


def two_dimensions(rank: int, world: int, settings: list[float | bool]) -> tuple[Report, list[str]]:
    """Weights gathered over one dimension of a 2 x 2 mesh, activations gathered and scattered over the other."""
    data, tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")).get_all_groups()
    names = [g.group_name for g in (data, tensor)]

    def fn(x: Tensor, shards: list[Tensor]) -> Tensor:
        for up, down in zip(shards[::2], shards[1::2], strict=True):
            whole = [c10d.wait_tensor(c10d.all_gather_into_tensor(w, 2, names[0])) for w in (up, down)]
            rows = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, names[1]))
            h = torch.nn.functional.silu(rows @ whole[0])
            x = c10d.wait_tensor(c10d.reduce_scatter_tensor(h @ whole[1], "sum", 2, names[1]))
        return x

    torch.manual_seed(rank)
    x, shards = torch.randn(32, 64), [torch.randn(32, 64) / 8 for _ in range(6)]
    fusion = FusionPass([tensor], reorder=settings[rank])
    torch._dynamo.reset()
    with passed(collectives) as graphs:
        y = torch.compile(fn, options=fusion.options)(x, shards)
    torch.testing.assert_close(y, fn(x, shards), rtol=1e-4, atol=1e-4)
    report = fusion.report()
    assert sum(e.fused_into is not None for e in report.entries) == 6
    assert report.fused == 6 * report.questions.fused
    assert all(o.crossed == {*names} for o in report.orders)  # so both vote
    return report, graphs[0]


def test_gathers_of_weights_pass_fused_ops_where_all_ranks_vote() -> None:
    ranks = run_ranks(verified, 4, two_dimensions, [1.0] * 4)
    assert all((r.questions.count, r.questions.fused) == (1, 1) for r, _ in ranks)
    assert all(graph == ranks[0][1] for _, graph in ranks)
    order = [name for name in ranks[0][1] if name not in ("agree", "verify_memory", "watch_memory")]
    ops = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"] * 3
    assert [name for name in order if name in ops] == ops
    (change,) = ranks[0][0].orders
    assert [p.after > 1 for p in change.placed] == [True, *[False] * 5], "the first has nothing to hide it"


def test_ranks_of_other_orders_run_unfused_in_that_of_the_program() -> None:
    ranks = run_ranks(two_dimensions, 4, [False, 1.0, 1.0, 1.0])
    assert [len(r.orders) for r, _ in ranks] == [0, 1, 1, 1]
    assert all((r.questions.count, r.questions.fused) == (1, 0) for r, _ in ranks)
