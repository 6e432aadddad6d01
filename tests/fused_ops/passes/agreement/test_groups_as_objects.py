"""Collectives whose group stands in the graph as an object, as torch allows from 2.13 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import AG, AR, by_inductors_passes, c10d, fake_ranks
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch_versions import needs_groups_as_objects
from weft.fused_ops import FusionPass


def passed_through(fn: Callable[..., Any], fusion: FusionPass, *inputs: Tensor) -> fx.Graph:
    """The graph in its own module, after the pass."""
    found: list[fx.Graph] = []

    def made(gm: fx.GraphModule) -> Any:
        found.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(post_grad_custom_post_pass=fusion, fx_graph_cache=False),
    ):
        torch.compile(fn, backend=by_inductors_passes(made), dynamic=False)(*inputs)
    (graph,) = found
    return graph


@needs_groups_as_objects
@pytest.mark.parametrize("as_input", [False, True])
def test_are_fused_by_their_names(as_input: bool) -> None:
    with fake_ranks(2) as name:
        group = dist.group.WORLD

        def fn(x: Tensor, w: Tensor, given: Any = None) -> tuple[Tensor, Tensor]:
            of = given or group
            y = c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", of))
            return y, c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, of)) @ w

        fusion = FusionPass(agree=False)
        given = (torch.randn(6, 8), torch.randn(8, 5), *([group] * as_input))
        graph = passed_through(fn, fusion, *given)
        entries = fusion.report().entries
        assert [(e.fused_into, e.group) for e in entries] == [(AR, name), (AG, name)], fusion.report()
        assert not graph.find_nodes(op="get_attr")


@needs_groups_as_objects
def test_of_other_groups_stay() -> None:
    with fake_ranks(2):
        group = dist.new_group([0, 1])

        def fn(x: Tensor, w: Tensor) -> Tensor:
            return c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", group))

        fusion = FusionPass([dist.group.WORLD], agree=False)
        passed_through(fn, fusion, torch.randn(6, 8), torch.randn(8, 5))
        (entry,) = fusion.report().entries
        assert (entry.group, entry.reason) == (
            group.group_name,
            "its group is none of those this pass is for",
        )
