"""What Inductor has matched before the pass runs, written out again.

A pattern of Inductor's that ends in a lowering leaves a Python function of its own in the graph. No form knows one, and
a graph that has one is no text that could be kept for ranks that do not agree: nothing in it would be fused. With
``max_autotune`` each sum of two products becomes one, as of two column-parallel layers' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from .graph.nodes import LeftAlone, aten
from .graph.rewrite import call

_Arguments: TypeAlias = "Callable[[list[fx.Node]], tuple[tuple[Any, ...], dict[str, Any]]]"


@dataclass(frozen=True)
class Written:
    """What stands for a call of ``target`` now; the last of the ``nodes`` is its result."""

    target: Any
    meta: dict[str, Any]
    nodes: list[fx.Node]
    arguments: _Arguments

    def put_back(self) -> None:
        """Unless some of it was fused, or is used by something else."""
        if any(n._erased for n in self.nodes):
            return
        *inner, result = self.nodes
        if not all(u in self.nodes for n in inner for u in n.users):
            return
        args, kwargs = self.arguments(self.nodes)
        with result.graph.inserting_before(result):
            node = result.graph.call_function(self.target, args, kwargs)
        node.meta = self.meta
        result.replace_all_uses_with(node)
        for n in self.nodes[::-1]:
            n.graph.erase_node(n)


def write_out(graph: fx.Graph) -> list[Written]:
    """Puts operators in place of what Inductor would lower by a function; gives what may be put back."""
    found = []
    for node in list(graph.nodes):
        name = _name(node)
        if name == "splitwithsizes_cat_replace":
            node.replace_all_uses_with(node.kwargs["input_"])  # type: ignore[arg-type]
            graph.erase_node(node)
        elif name == "cat_splitwithsizes_replace":
            _replace_parts(node)
            graph.erase_node(node)
        elif name in _WRITERS:
            write, arguments = _WRITERS[name]
            made: list[fx.Node] = []
            try:
                write(node, made)
            except LeftAlone:
                for new in made[::-1]:
                    graph.erase_node(new)
                continue
            found.append(Written(node.target, dict(node.meta), made, arguments))
            made[-1].meta["stack_trace"] = node.meta.get("stack_trace")
            node.replace_all_uses_with(made[-1])
            graph.erase_node(node)
    return found


def _name(node: fx.Node) -> str | None:
    """Of the function that lowers what was matched here; None where that is none of Inductor's."""
    if node.op != "call_function" or not isinstance(node.target, functools.partial):
        return None
    fn = node.target.func
    return fn.__name__ if fn.__module__ == "torch._inductor.fx_passes.post_grad" else None


def _replace_parts(node: fx.Node) -> None:
    """All that is joined and cut again where it was joined."""
    for part in list(node.users):
        part.replace_all_uses_with(node.kwargs["input_"][part.args[1]])  # type: ignore[index, arg-type]
        node.graph.erase_node(part)


def _sum(node: fx.Node, made: list[fx.Node]) -> None:
    a, b, c, d = (node.kwargs[f"mat{i}"] for i in (1, 2, 3, 4))
    made.append(call(node, aten.mm.default, a, b))
    made.append(call(node, aten.mm.default, c, d))
    made.append(call(node, aten.add.Tensor, *made))


def _of_sum(nodes: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (a, b), (c, d) = nodes[0].args, nodes[1].args
    return (), {"mat1": a, "mat2": b, "mat3": c, "mat4": d}


def _cat_slice_cat(node: fx.Node, made: list[fx.Node]) -> None:
    made.append(call(node, aten.cat.default, list(node.args[0]), 1))  # type: ignore[arg-type]
    made.append(call(node, aten.slice.Tensor, made[0], 1, 0, node.kwargs["size"]))
    made.append(call(node, aten.cat.default, list(made), 1))


_WRITERS: dict[str | None, tuple[Callable[[fx.Node, list[fx.Node]], None], _Arguments]] = {
    "mm_plus_mm": (_sum, _of_sum),
    "cat_slice_cat": (_cat_slice_cat, lambda nodes: ((nodes[0].args[0],), {"size": nodes[1].args[3]})),
}
