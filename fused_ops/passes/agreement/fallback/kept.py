"""A graph that is kept as it was, as bytes, which Inductor's caches keep and any process of the program can run."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor import inductor_prims

from ...graph.collectives import collectives
from ...graph.nodes import is_val, val, what

#: Operators that call graphs, and which run op by op as well as compiled.
CALLERS = ("cond", "while_loop", "invoke_subgraph", "flex_attention", "flex_attention_backward")
#: What draws by a seed that is a tensor, and which argument it is. Op by op they take no notice of it.
DRAWS = {inductor_prims.random: (1, "seed"), inductor_prims.randint: (3, "seed")}
#: What an activation checkpoint makes of operators that may draw random numbers, and at which argument the operator is.
STATEFUL = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
_KEPT = "which cannot be kept for ranks that do not agree"


class KeptGraph(NamedTuple):
    """A fallback graph.

    What draws a checkpoint's seeds, or saves the generator's state, is a graph of its own, which runs first.

    Attributes:
        graph: as ``pickled`` gives it.
        redraws: whether it draws random numbers that another graph draws, too, from the same seed.
        seeds: of what draws seeds, which are the last inputs of the graph; None where nothing is drawn.
    """

    graph: bytes
    redraws: bool = False
    seeds: bytes | None = None

    @staticmethod
    def of(graph: fx.Graph, owner: Any, redraws: bool = False) -> KeptGraph:
        """``owner``: the module that has the graph's attributes."""
        graph = graph_copy(graph)
        seeds = _take_states(graph)
        return KeptGraph(pickled(graph, owner), redraws, None if seeds is None else pickled(seeds, owner))


def why_not_pickled(graph: fx.Graph, owner: Any) -> str | None:
    """Why the bytes would not do in another process; None if they would."""
    for _, module in attributes(graph, owner):
        if isinstance(module, fx.GraphModule):
            why = _why_not_called(module.graph) or why_not_pickled(module.graph, module)
            if why is not None:
                return why
    for node in graph.nodes:
        try:
            _Pickler(io.BytesIO()).dump((node.target, node.args, node.kwargs))
        except Exception:
            named = getattr(
                node.target, "__name__", node.target
            )  # no address: reasons are the same on every rank
            return f"the graph uses {named}, {_KEPT}"
    return None


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return obj.name if isinstance(obj, fx.Node) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.GraphModule):
            return unpickled, (pickled(obj.graph, obj),)
        if isinstance(obj, torch._ops.OpOverload):
            return _operator, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, torch._ops.HigherOrderOperator):
            return _operator, ("higher_order", obj.name())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.nodes: dict[str, fx.Node] = {}

    def persistent_load(self, name: str) -> fx.Node:
        return self.nodes[name]


def _operator(*names: str) -> Any:
    found: Any = torch.ops
    for name in names:
        found = getattr(found, name)
    return found


def pickled(graph: fx.Graph, owner: Any) -> bytes:
    """The graph, and what it reads from its module."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    read = {
        str(node.target): value.detach() if isinstance(value, torch.Tensor) else value
        for node, value in attributes(graph, owner)
    }
    pickler.dump((len(graph.nodes), read))
    for node in graph.nodes:
        pickler.dump((node.name, node.op, node.target, node.args, node.kwargs))
    return buffer.getvalue()


def unpickled(data: bytes) -> fx.GraphModule:
    unpickler, graph = _Unpickler(data), fx.Graph()
    count, read = unpickler.load()
    for _ in range(count):
        name, *made = unpickler.load()
        unpickler.nodes[name] = graph.create_node(*made)
    return fx.GraphModule(read, graph)


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
