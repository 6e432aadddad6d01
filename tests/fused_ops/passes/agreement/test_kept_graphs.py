"""What else is kept for ranks that do not agree: attention in checkpoints, and graphs that return objects."""

from __future__ import annotations

import pytest
import torch
from graphs import AG, c10d, captured, gather, traced
from test_agree import W, X, gathered, group, passed, program, questions
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint
from weft.fused_ops.passes import Entry, FusionPass
from weft.fused_ops.passes.agreement.fallback import FallbackRuns, pickled
from weft.fused_ops.passes.agreement.fallback_graph import FallbackGraph
from weft.fused_ops.passes.agreement.guard import GraphGuard

__all__ = ["group"]  # the fixture


def test_the_kept_graph_leaves_objects_to_the_generated_code() -> None:
    """A backward of DTensors with sizes that change returns their mesh."""
    module, mesh = fx.GraphModule({}, traced(program, X, W)), object()
    module.mesh = mesh
    out = module.graph.output_node()
    with module.graph.inserting_before(out):
        returned = module.graph.get_attr("mesh")
    out.args = ([out.args[0], returned],)
    reasons, after = passed(module.graph)
    assert reasons == [""]
    assert "mesh" in str(after.output_node().args)
    (question,) = questions(after)
    y, given = GraphGuard(str(question.args[0])).fallback([X, W], [None, None], {1: mesh})
    assert y.shape == (12, 5)
    assert given is mesh


@pytest.mark.parametrize("dropout", [None, "in attention", "inside", "outside"])
def test_attention_in_a_checkpoint(dropout: str | None) -> None:
    """Without dropout there is nothing to draw again, though graphs keep a generator's state for it: before torch 2.14,
    and where something is drawn in the checkpoint."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        h = (gather(x) @ w)[None, None]
        p = 0.5 if dropout == "in attention" else 0.0
        h = torch.nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=p)[0, 0].sin()
        return torch.nn.functional.dropout(h, 0.5) if dropout == "inside" else h

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(layer, x, w, use_reentrant=False)
        return torch.nn.functional.dropout(y, 0.5) if dropout == "outside" else y

    # CPU attention with dropout is made of other operators, which are drawn as Inductor's dropout is.
    with inductor_config.patch(fallback_random=dropout in ("in attention", "inside")):
        forward, *_ = seen = captured(fn, X, W.clone().requires_grad_(), fusion=FusionPass())
    kept = "rng_state" in str(forward.before)
    assert kept or (torch.__version__ >= (2, 14) and dropout in (None, "outside"))
    if dropout in (None, "outside") or not kept:
        assert all(s.fused and set(s.fused) == {AG} for s in seen)
    else:
        assert [s.fused for s in seen] == [[None], [None]]
        assert all("random numbers that another graph draws again" in s.reasons for s in seen)


@pytest.mark.parametrize("crossed", [[], ["0"]])
def test_a_graph_whose_collectives_are_left_in_another_order_asks_each_time(crossed: list[str]) -> None:
    """Another rank has them as the text does."""
    after = traced(lambda x: gathered(x).sin(), X)
    (node,) = (n for n in after.nodes if n.target is c10d.all_gather_into_tensor.default)
    entry = Entry(0, node.name, "all_gather_into_tensor", "0")
    FallbackGraph(after, [node]).ask_first(after, [entry], [], crossed)
    (question,) = questions(after)
    assert GraphGuard(str(question.args[0]))._unasked is not bool(crossed)


def test_the_constants_of_a_kept_graph() -> None:
    """Op by op and compiled."""
    graph = fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("constant")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, c)),))
    module = torch.nn.Module()
    module.register_buffer("constant", constant := torch.randn(5))
    runs = FallbackRuns("g", pickled(graph, module), redraws=False)
    for _ in range(4):
        assert torch.equal(runs.run([X[:, :5]], compiles=True)[0], X[:, :5] * constant)
    assert callable(*runs._runs.values())
