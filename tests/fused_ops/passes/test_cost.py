"""What the pass costs while compiling: linear in the graph, and little."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cost import in_copies
from graphs import c10d, copied, fake_ranks, gather, scatter, traced
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement import fallback_graph
from weft.fused_ops.passes.records.report import Report

WORLD = 2
POINTWISE = 38  # between a gather and a scatter, so that 400 collectives stand among 10,000 nodes


@pytest.fixture(autouse=True)
def ranks_to_ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeping the graph for ranks that do not agree is part of the cost."""
    with fake_ranks(WORLD):
        monkeypatch.setattr(fallback_graph, "uncounting_backend", lambda group: None)
        yield


def two_blocks(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Twice a gather and a product, pointwise ops, a product and a scatter; along dimension 0, and along 1."""
    aten = torch.ops.aten
    for dim in (0, 1):
        y = c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, "0"))
        if dim:
            y = torch.cat(y.split(x.shape[0]), 1)
        h = aten.mm.default(y.reshape(-1, y.shape[-1]), w)
        for _ in range(POINTWISE // 2):
            h = aten.add.Tensor(aten.sin.default(h), h)
        h = aten.mm.default(h, w)
        if dim:
            h = torch.cat(h.reshape(x.shape[0], -1, w.shape[1]).split(x.shape[1], 1), 0)
        x = c10d.wait_tensor(c10d.reduce_scatter_tensor(h, "sum", WORLD, "0"))
        x = x.reshape(-1, w.shape[1]) if dim else x.reshape(3, -1, w.shape[1])
    return (x,)


def blocks(pairs: int) -> fx.Graph:
    """Two blocks, repeated: node by node, because tracing them all takes many times as long as the pass."""
    pattern = traced(two_blocks, torch.randn(6, 8), torch.randn(8, 8))
    graph = fx.Graph()
    (x, w), *_ = [[n for n in pattern.nodes if n.op == "placeholder"]]
    new_x, new_w = graph.node_copy(x), graph.node_copy(w)
    for _ in range(pairs):
        values = {x: new_x, w: new_w}
        for node in pattern.nodes:
            if node.op == "call_function":
                values[node] = graph.node_copy(node, values.__getitem__)
            elif node.op == "output":
                new_x = values[node.args[0][0]]
    graph.output((new_x,))
    return graph


def fused(graph: fx.Graph) -> Report:
    fusion = FusionPass()
    fusion(graph)
    return fusion.report()


def test_a_large_graph() -> None:
    small, large = blocks(25), blocks(100)
    assert len(large.nodes) >= 10_000
    fused(copied(small))
    quarter, _ = in_copies(fused, small)
    whole, report = in_copies(fused, large)
    assert len(report.entries) == 400
    assert report.left == 0, report.entries[0]
    assert whole < 16, f"as long as {whole:.1f} copies of the graph"  # 9; a copy is 0.08 s of a core of 2026
    # Linear is the same, quadratic 4 times.
    assert whole < 2 * quarter, f"as long as {whole:.1f} copies, a quarter of the graph {quarter:.1f}"


def swiglu(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = gather(x, 1)
    return x + scatter(F.linear(F.silu(F.linear(y, a)) * F.linear(y, b), c), 1)


def shares(rank: int, size: int) -> tuple[float, float]:
    """CPU seconds of the pass and of a whole compilation, forward and backward, with the C++ compiler's."""
    spent = []
    run = FusionPass.__call__

    def timed(self: FusionPass, graph: fx.Graph) -> None:
        begin = time.process_time()
        run(self, graph)
        spent.append(time.process_time() - begin)

    def now() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    def fn(x: Tensor, *w: Tensor) -> Tensor:
        return swiglu(swiglu(x, *w[:3]), *w[3:])

    def compiled(columns: int) -> float:
        weights = [torch.randn(20, 24), torch.randn(20, 24), torch.randn(24, 20)] * 2
        x = torch.randn(2, columns, 24)
        torch._dynamo.reset()
        begin = now()
        with inductor_config.patch(fx_graph_cache=False):
            torch.compile(fn, options=fusion.options, dynamic=False)(
                x, *(w.requires_grad_() for w in weights)
            ).sum().backward()
        return now() - begin

    fusion = FusionPass(strict=True)
    FusionPass.__call__ = timed  # type: ignore[method-assign]
    try:
        compiled(9)  # what is imported and compiled once
        spent.clear()
        whole = compiled(10)
    finally:
        FusionPass.__call__ = run  # type: ignore[method-assign]
    assert len(spent) == 2
    return sum(spent), whole


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_compilation() -> None:
    for spent, whole in run_ranks(shares, 2, fresh=True, timeout=900.0):
        print(f"{spent:.3f} of {whole:.3f} s: {spent / whole:.1%}")
        assert spent < 0.02 * whole, f"{spent:.3f} of {whole:.3f} s"
