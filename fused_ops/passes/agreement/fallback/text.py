"""A graph as source text, which Inductor's caches keep and any process of the program can run."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch.fx.graph import PythonCode

from ...graph.collectives import collectives
from ...graph.nodes import is_val, val, what
from .called import CALLERS, CalledGraph, calls_by_name

#: What draws by a seed that is a tensor, and which argument it is. Op by op they take no notice of it.
DRAWS = {inductor_prims.random: (1, "seed"), inductor_prims.randint: (3, "seed")}
#: What an activation checkpoint makes of operators that may draw random numbers, and at which argument the operator is.
STATEFUL = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
_BUILTIN = fx.graph._custom_builtins  # what a graph's text may use without an import
_SIGNATURE = re.compile(r"^def forward\(self.*?\)[^\n()]*:\n", re.DOTALL | re.MULTILINE)
_KEPT = "which cannot be kept for ranks that do not agree"


class GraphText:
    """The text of a graph, and of those that it calls.

    What draws a checkpoint's seeds, or saves the generator's state, is a graph of its own, to which Dynamo has no way,
    and which runs first.

    Args:
        owner: the module that has the graph's attributes.
    """

    def __init__(self, graph: fx.Graph, owner: Any) -> None:
        self._graph = graph_copy(graph)
        self._seeds = _take_states(self._graph)
        self._called = {
            str(node.target): (module.graph, GraphText(module.graph, module))
            for node, module in attributes(graph, owner)
            if isinstance(module, fx.GraphModule)
        }
        calls_by_name(self._graph)

    @cached_property
    def _written(self) -> PythonCode:
        return _python_code(self._graph)

    def why_not(self) -> str | None:
        """Why the text would not do in another process; None if it would."""
        for graph, text in self._called.values():
            if (why := _why_not_called(graph)) is not None or (why := text.why_not()) is not None:
                return why
        of_seeds = {} if self._seeds is None else _python_code(self._seeds).globals
        for name, value in (self._written.globals | of_seeds).items():
            if name not in _BUILTIN and not _importable(value):
                named = getattr(value, "__name__", value)  # no address: reasons are the same on every rank
                return f"the graph uses {named}, {_KEPT}"
        return None

    def code(self) -> str:
        """``def forward(self, args)``, which empties ``args``; the seeds are the last of these."""
        return _code(self._graph, self._written)

    def seeds(self) -> str | None:
        """``def forward(self, args)``, which empties ``args`` and returns the seeds; None if there are none."""
        return None if self._seeds is None else _code(self._seeds, _python_code(self._seeds))

    def called(self) -> dict[str, CalledGraph]:
        return {
            name: (len(_inputs(text._graph)), text.code(), text.called())
            for name, (_, text) in self._called.items()
        }


def _python_code(graph: fx.Graph) -> PythonCode:
    for node in graph.nodes:
        node.type = None
    return graph.python_code("self")


def _inputs(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op == "placeholder"]


def _code(graph: fx.Graph, written: PythonCode) -> str:
    inputs = _inputs(graph)
    unpack = f"    {', '.join(inputs)}, = args; args.clear()\n" if inputs else ""
    body, replaced = _SIGNATURE.subn(lambda _: f"def forward(self, args):\n{unpack}", written.src, count=1)
    assert replaced == 1
    imports = [
        f"from {value.__module__} import {value.__name__} as {name}\n"
        for name, value in written.globals.items()
        if name not in _BUILTIN
    ]
    return "".join(imports) + body[body.index("def forward") :]


def draws_seeds(node: fx.Node) -> bool:
    """Whether a checkpoint's operator draws seeds, of nothing but the graph's inputs: the numbers after them are drawn
    by seed and place in the tensor, wherever that lies in memory."""
    if (at := STATEFUL.get(caller_of(node) or "")) is None:
        return False
    of_inputs = all(n.op == "placeholder" for n in node.all_input_nodes)
    return of_inputs and node.args[at] in (inductor_prims.seed, inductor_prims.seeds)


def draws_nothing(node: fx.Node) -> bool:
    """Whether a checkpoint's operator is attention without dropout."""
    op, *args = node.args[STATEFUL[node.target.name()] :]  # type: ignore[union-attr]
    for i, a in enumerate(op._schema.arguments):  # type: ignore[union-attr]
        if a.name == "dropout_p":
            return bool((args[i] if i < len(args) else node.kwargs.get(a.name, a.default_value)) == 0)
    return False


def _take_states(graph: fx.Graph) -> fx.Graph | None:
    """Has a graph take the seeds, and the generator's states, as its last inputs, and call what draws nothing as it is;
    gives the graph that makes the former."""
    drawing = [n for n in graph.nodes if draws_seeds(n)]
    saving = [n for n in graph.nodes if caller_of(n) in STATEFUL and n not in drawing and draws_nothing(n)]
    seeds = fx.Graph()
    copies = {n: seeds.node_copy(n) for n in graph.nodes if n.op == "placeholder"}
    begin = next(n for n in graph.nodes if n.op != "placeholder")
    made: list[fx.Node] = []

    def take(part: fx.Node, copy: fx.Node) -> None:
        made.append(copy)
        with graph.inserting_before(begin):
            given = graph.placeholder(f"drawn_{len(made)}")
        given.meta = dict(part.meta)
        part.replace_all_uses_with(given)

    for node in drawing:
        copies[node] = seeds.node_copy(node, copies.__getitem__)
        parts = list(node.users) if caller_of(node) == "run_and_save_rng_state" else [node]
        for part in parts:
            take(part, copies.get(part) or seeds.node_copy(part, copies.__getitem__))
            if part is not node:
                graph.erase_node(part)
    for node in drawing:
        graph.erase_node(node)
    for node in saving:
        for part in _called_as_it_is(node):
            # As it is before the graph: what starts from it draws nothing either.
            where: dict[str, Any] = {"device": next(val(n).device for n in node.all_input_nodes if is_val(n))}
            saved = seeds.call_function(node.target, (torch.ops.aten.empty.memory_format, [0]), where)
            take(part, seeds.call_function(operator.getitem, (saved, 0)))
            graph.erase_node(part)
        graph.erase_node(node)
    seeds.output(tuple(made))
    return seeds if made else None


def _called_as_it_is(node: fx.Node) -> list[fx.Node]:
    """Has the graph call what a checkpoint's operator calls; the states that this one has saved are left."""
    op, *args = node.args[STATEFUL[caller_of(node) or ""] :]
    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    with node.graph.inserting_before(node):
        plain = node.graph.call_function(op, tuple(args), kwargs)  # type: ignore[arg-type]
    saves = caller_of(node) == "run_and_save_rng_state"
    plain.meta = {
        **node.meta,
        "val": node.meta["val"][1] if saves and "val" in node.meta else node.meta.get("val"),
    }
    if not saves:
        node.replace_all_uses_with(plain)
        return []
    for part in [part for part in node.users if part.args[1] == 1]:
        part.replace_all_uses_with(plain)
        node.graph.erase_node(part)
    return list(node.users)


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
