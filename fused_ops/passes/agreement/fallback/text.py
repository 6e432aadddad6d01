"""A graph as source text, which Inductor's caches keep and any process of the program can run."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch.fx.graph import PythonCode

from ...graph.collectives import collectives, what
from .called import CALLERS, CalledGraph, calls_by_name

#: What draws by a seed that is a tensor, and which argument it is. Op by op they take no notice of it.
DRAWS = {inductor_prims.random: (1, "seed"), inductor_prims.randint: (3, "seed")}
_BUILTIN = fx.graph._custom_builtins  # what a graph's text may use without an import
_SIGNATURE = re.compile(r"^def forward\(self.*?\)[^\n()]*:\n", re.DOTALL | re.MULTILINE)
_KEPT = "which cannot be kept for ranks that do not agree"


class GraphText:
    """The text of a graph, and of those that it calls.

    Args:
        owner: the module that has the graph's attributes.
    """

    def __init__(self, graph: fx.Graph, owner: Any) -> None:
        self._inputs = [n.name for n in graph.nodes if n.op == "placeholder"]
        self._graph = graph_copy(graph)
        self._called = {
            str(node.target): (module.graph, GraphText(module.graph, module))
            for node, module in attributes(graph, owner)
            if isinstance(module, fx.GraphModule)
        }
        calls_by_name(self._graph)

    @cached_property
    def _written(self) -> PythonCode:
        for node in self._graph.nodes:
            node.type = None
        return self._graph.python_code("self")

    def why_not(self) -> str | None:
        """Why the text would not do in another process; None if it would."""
        for graph, text in self._called.values():
            if (why := _why_not_called(graph)) is not None or (why := text.why_not()) is not None:
                return why
        for name, value in self._written.globals.items():
            if name not in _BUILTIN and not _importable(value):
                named = getattr(value, "__name__", value)  # no address: reasons are the same on every rank
                return f"the graph uses {named}, {_KEPT}"
        return None

    def code(self) -> str:
        """``def forward(self, args)``, which empties ``args``."""
        unpack = f"    {', '.join(self._inputs)}, = args; args.clear()\n" if self._inputs else ""
        text = self._written.src
        body, replaced = _SIGNATURE.subn(lambda _: f"def forward(self, args):\n{unpack}", text, count=1)
        assert replaced == 1
        imports = [
            f"from {value.__module__} import {value.__name__} as {name}\n"
            for name, value in self._written.globals.items()
            if name not in _BUILTIN
        ]
        return "".join(imports) + body[body.index("def forward") :]

    def called(self) -> dict[str, CalledGraph]:
        return {
            name: (len(text._inputs), text.code(), text.called()) for name, (_, text) in self._called.items()
        }


def graph_copy(graph: fx.Graph, without: Collection[fx.Node] = ()) -> fx.Graph:
    """Where the graph returns a node that is left out, the copy returns None."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outputs = fx.node.map_arg(graph.output_node().args[0], lambda n: None if n in without else n)
    for node in graph.nodes:
        if node.op != "output" and node not in without:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    output = copy.output(fx.node.map_arg(outputs, copies.__getitem__))
    output.meta = dict(graph.output_node().meta)
    return copy


def attributes(graph: fx.Graph, owner: Any) -> Iterator[tuple[fx.Node, Any]]:
    """What the graph reads from its module."""
    for node in graph.find_nodes(op="get_attr"):
        value = owner
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        yield node, value


def caller_of(node: fx.Node) -> str | None:
    """The operator of higher order that a node is, by its name."""
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else None


def _why_not_called(graph: fx.Graph) -> str | None:
    """Why a graph that another one calls cannot be kept with it."""
    owner = graph.owning_module
    for node in collectives(graph):
        return f"{what(node)} is in a graph that this one calls, {_KEPT}"
    for node in graph.nodes:
        if node.target in DRAWS:
            return f"{what(node)} draws random numbers in a graph that this one calls, {_KEPT}"
        if (name := caller_of(node)) is not None and name not in CALLERS:
            return f"the graph calls {name}, {_KEPT}"
        if node.op == "call_module":
            return f"the graph calls the module {node.target}"
    for node, value in attributes(graph, owner):
        if not isinstance(value, fx.GraphModule):
            return f"the graph reads {node.target}, {_KEPT}"
    return None


def _importable(value: Any) -> bool:
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    return module in sys.modules and getattr(sys.modules[module], str(name), None) is value
