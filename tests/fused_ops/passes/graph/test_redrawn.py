"""Dropout in a checkpoint, which the backward draws again: forward and backward fused, or unfused each by itself."""

from __future__ import annotations

import itertools
import operator
from unittest import mock

import pytest
import torch
from opcommon import BOUND, check
from ranks import run_ranks
from test_pass_on_gpus import gather, scatter
from test_ranks_that_differ import compiler
from torch import Tensor, fx
from torch._inductor import compile_fx, inductor_prims
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement.fallback import FallbackRuns, pickled
from weft.fused_ops.passes.agreement.guard import GraphGuard
from weft.symm_mem import WeftError

aten, SIZE = torch.ops.aten, [4, 3]


def attention(h: Tensor) -> Tensor:
    """Before torch 2.14 graphs keep a generator's state for it."""
    return F.scaled_dot_product_attention(h[None, None], h.sin()[None, None], h.cos()[None, None])[0, 0]


def layer(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = F.dropout(attention(gather(x) @ a), 0.5)
    return scatter(h @ b), h


def recomputed(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y, h = checkpoint(layer, x, a, b, use_reentrant=False)
    return y, h.detach()


def with_mask(x: Tensor, a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    return scatter((attention(gather(x) @ a) * kept * 2) @ b)


def trained(rank: int, size: int) -> Report:
    """Gradients are those of the mask that the forward drew, whichever of the two graphs runs unfused."""
    turn = GraphGuard.turn
    with compiler():
        fusion = FusionPass(fuse="always")
        ours = torch.compile(recomputed, options=fusion.options, dynamic=False)
        for left in [(False, False), *itertools.product((False, True), repeat=2), (False, False)]:
            graphs = iter(left)

            def answer(guard: GraphGuard, *sizes: int, graphs=graphs) -> object:
                return None if next(graphs) else turn(guard, *sizes)

            given = [torch.randn(s).div_(4) for s in ((6, 8), (8, 10), (10, 8))]
            exact = [t.double().requires_grad_() for t in given]
            given = [t.requires_grad_() for t in given]
            with mock.patch.object(GraphGuard, "turn", answer):
                got, h = ours(*given)
                got.backward(torch.ones_like(got))
            assert next(graphs, None) is None
            kept = h != 0
            assert 0.2 < kept.double().mean() < 0.8
            want = with_mask(*exact, kept)
            want.backward(torch.ones_like(want))
            check("result", got, want, 4 * BOUND[torch.float32])
            for a, b in zip(given, exact, strict=True):
                check("gradient", a.grad, b.grad, 8 * BOUND[torch.float32])
        return fusion.report()


def test_dropout_that_is_recomputed() -> None:
    for report in run_ranks(trained, 2):
        assert report.left == 0, report
        assert report.fused >= 4, report


def test_what_must_be_compiled_and_cannot_be() -> None:
    """Op by op other numbers would be drawn, so it is an error."""
    graph = fx.Graph()
    graph.output(())
    runs = FallbackRuns("g", pickled(graph, None), redraws=True)
    with pytest.raises(
        WeftError, match=r"graph g: runs unfused, .* a CUDA graph is captured, and draws random"
    ):
        runs.run([], compiles=False)

    with mock.patch.object(compile_fx, "compile_fx_inner", side_effect=RuntimeError("no")):
        for _ in range(2):
            with pytest.raises(WeftError, match=r"graph g: .* random numbers"):
                runs.run([], compiles=True)


def drawing(graph: fx.Graph, seeds: fx.Node, x: fx.Node) -> fx.Node:
    seed = graph.call_function(inductor_prims.lookup_seed, (seeds, 0))
    return graph.call_function(
        aten.mul.Tensor, (x, graph.call_function(inductor_prims.random, (SIZE, seed, "rand")))
    )


def runs_of(graph: fx.Graph) -> FallbackRuns:
    return FallbackRuns("g", pickled(graph, None), redraws=True)


def test_seeds_that_a_checkpoint_draws_again() -> None:
    """As torch writes them from 2.15 on: the forward keeps the generator's state, and the backward starts from it."""
    torch._dynamo.reset()
    operators, cpu = torch.ops.higher_order, torch.device("cpu")
    forward, backward = fx.Graph(), fx.Graph()
    x = forward.placeholder("x")
    both = forward.call_function(operators.run_and_save_rng_state, (inductor_prims.seeds, 1), {"device": cpu})
    state, seeds = (forward.call_function(operator.getitem, (both, i)) for i in range(2))
    forward.output((drawing(forward, seeds, x), state))
    state, grad = backward.placeholder("state"), backward.placeholder("grad")
    seeds = backward.call_function(
        operators.run_with_rng_state, (state, inductor_prims.seeds, 1), {"device": cpu}
    )
    backward.output((drawing(backward, seeds, grad),))
    y, kept = runs_of(forward).run([torch.ones(SIZE)], compiles=True)
    other, _ = runs_of(forward).run([torch.ones(SIZE)], compiles=True)
    (again,) = runs_of(backward).run([kept, torch.ones(SIZE)], compiles=True)
    assert 0 <= y.min() < y.max() < 1
    assert torch.equal(again, y)
    assert not torch.equal(other, y)
