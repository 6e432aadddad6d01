"""A graph whose collectives do no more than memory does: what would be left if all communication were hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from weft.fused_ops.passes.graph.rewrite import call

_C10D = torch.ops._c10d_functional


class WithoutCommunication(CustomGraphPass):
    """For torch.compile's option ``post_grad_custom_pre_pass``.

    An all-gather repeats this rank's part, a reduce-scatter takes it, an all-reduce is what it is given. Results are
    others, of the same sizes and much the same numbers.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            instead = _INSTEAD.get(node.target)
            if instead is None:
                continue
            node.replace_all_uses_with(instead(node))
            graph.erase_node(node)

    def uuid(self) -> Any:
        return None  # such graphs are not kept


def _gathered(node: fx.Node) -> fx.Node:
    x, size, _ = node.args
    return call(node, torch.ops.aten.cat.default, [x] * size)  # type: ignore[operator]


def _scattered(node: fx.Node) -> fx.Node:
    x, _, size, _ = node.args
    rows = x.meta["val"].shape[0] // size  # type: ignore[union-attr]
    rank = dist.get_rank()
    return call(node, torch.ops.aten.slice.Tensor, x, 0, rank * rows, (rank + 1) * rows)


def _given(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


_INSTEAD: dict[Any, Callable[[fx.Node], fx.Node]] = {
    _C10D.all_gather_into_tensor.default: _gathered,
    _C10D.reduce_scatter_tensor.default: _scattered,
    _C10D.all_reduce.default: _given,
    _C10D.wait_tensor.default: _given,
}
