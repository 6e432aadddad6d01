"""What Inductor has matched before the pass runs, written out again.

A pattern of Inductor's that ends in a lowering leaves a Python function of its own in the graph. No form knows one, and
a graph that has one is no text that could be kept for ranks that do not agree: nothing in it would be fused. With
``max_autotune`` each sum of two products becomes one, as of two column-parallel layers' gradients.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from .graph.nodes import LeftAlone, aten
from .graph.rewrite import call, undone_if_left


def write_out(graph: fx.Graph) -> None:
    """Puts operators in place of what Inductor would lower by a function."""
    for node in list(graph.nodes):
        name = _name(node)
        if name == "splitwithsizes_cat_replace":
            new = node.kwargs["input_"]
        elif name == "cat_splitwithsizes_replace":
            _replace_parts(node)
            continue
        elif name in _WRITERS:
            try:
                with undone_if_left():
                    new = _WRITERS[name](node)
            except LeftAlone:
                continue
            new.meta["stack_trace"] = node.meta.get("stack_trace")
        else:
            continue
        node.replace_all_uses_with(new)  # type: ignore[arg-type]
        graph.erase_node(node)


def _name(node: fx.Node) -> str:
    """Of the function that lowers what was matched here; "" where that is none of Inductor's."""
    if node.op != "call_function" or not isinstance(node.target, functools.partial):
        return ""
    fn = node.target.func
    return fn.__name__ if fn.__module__ == "torch._inductor.fx_passes.post_grad" else ""


def _replace_parts(node: fx.Node) -> None:
    """All that is joined and cut again where it was joined."""
    for part in list(node.users):
        part.replace_all_uses_with(node.kwargs["input_"][part.args[1]])  # type: ignore[index, arg-type]
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def _sum_of_products(node: fx.Node) -> fx.Node:
    a, b, c, d = (node.kwargs[f"mat{i}"] for i in (1, 2, 3, 4))
    return call(node, aten.add.Tensor, call(node, aten.mm.default, a, b), call(node, aten.mm.default, c, d))


def _joined_once_more(node: fx.Node) -> fx.Node:
    given: Any = node.args[0]
    whole = call(node, aten.cat.default, list(given), 1)
    part = call(node, aten.slice.Tensor, whole, 1, 0, node.kwargs["size"])
    return call(node, aten.cat.default, [whole, part], 1)


_WRITERS = {"mm_plus_mm": _sum_of_products, "cat_slice_cat": _joined_once_more}
