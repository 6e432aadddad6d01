"""The graph as it was before the pass, for ranks that do not agree: kept as bytes in the generated code, and run op by
op at first, then compiled without the pass.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ....symm_mem import WeftError
from ..graph.collectives import collectives
from ..graph.nodes import calls, what

# Operators that call graphs, and which run op by op as well as compiled.
_CALLERS = ("cond", "while_loop", "invoke_subgraph", "flex_attention", "flex_attention_backward")
#: What draws by a seed that is a tensor, and which argument it is. Op by op they take no notice of it.
DRAWS = {inductor_prims.random: (1, "seed"), inductor_prims.randint: (3, "seed")}
# What an activation checkpoint makes of operators that may draw random numbers, and at which argument the operator is.
_STATEFUL = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
# Operators of higher order that take no graphs, objects or numbers of this process's tables: a user's operator that
# writes to its arguments.
_AS_BYTES = ("auto_functionalized_v2",)
_CONSTANT_BYTES = 1 << 20
_KEPT = "which cannot be kept for ranks that do not agree"
_log = logging.getLogger("weft.passes")
_OP_BY_OP = 2  # runs with inputs of the same sizes until it is compiled for them
_KNOWN = 32  # inputs of different sizes whose runs are counted, or for which it is kept compiled
#: Op by op they write out all scores: a graph that calls them is compiled before it runs.
_AT_ONCE = ("flex_attention", "flex_attention_backward")
_state = threading.local()


def why_not_kept(graph: fx.Graph, owner: Any, called: bool = False) -> str | None:
    """Why the bytes would not do in another process, or compute something else; None if they would do. ``called``: the
    graph is called by the one that is kept."""
    size = 0
    communicating = {*collectives(graph)} if called else set()
    for node in graph.nodes:
        name = _caller_of(node)
        if node in communicating:
            return f"{what(node)} is in a graph that this one calls, {_KEPT}"
        if called and node.target in DRAWS:
            return f"{what(node)} draws random numbers in a graph that this one calls, {_KEPT}"
        if name in _STATEFUL and not called:
            if not _draws_seeds(node) and not _draws_nothing(node):
                return (
                    f"{what(node)} draws random numbers that another graph draws again, as for dropout that is "
                    "recomputed: in their order in memory, which fusing may change in one of the two graphs"
                )
        elif name is not None and name not in _CALLERS and (called or name not in _AS_BYTES):
            return f"the graph calls {name}, {_KEPT}"
        if node.op == "call_module":
            return f"the graph calls the module {node.target}"
        try:
            _Pickler(io.BytesIO()).dump((node.target, node.args, node.kwargs))
        except Exception:
            # No address: reasons are the same on every rank.
            return f"the graph uses {getattr(node.target, '__name__', node.target)}, {_KEPT}"
    for node, value in attributes(graph, owner):
        if isinstance(value, fx.GraphModule):
            if (why := why_not_kept(value.graph, value, called=True)) is not None:
                return why
        elif called or not isinstance(value, torch.Tensor):
            return f"the graph reads {node.target}, {_KEPT}"
        else:
            size += value.nbytes
    if size > _CONSTANT_BYTES:
        return f"the graph holds {size} bytes of constants, too many to be kept for ranks that do not agree"
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


def _draws_seeds(node: fx.Node) -> bool:
    """Whether a checkpoint's operator draws seeds, of nothing but the graph's inputs: the numbers after them are drawn
    by seed and place in the tensor, wherever that lies in memory."""
    if (at := _STATEFUL.get(_caller_of(node) or "")) is None:
        return False
    of_inputs = all(n.op == "placeholder" for n in node.all_input_nodes)
    return of_inputs and node.args[at] in (inductor_prims.seed, inductor_prims.seeds)


def _draws_nothing(node: fx.Node) -> bool:
    """Whether a checkpoint's operator is attention without dropout."""
    op, *args = node.args[_STATEFUL[node.target.name()] :]  # type: ignore[union-attr]
    for i, a in enumerate(op._schema.arguments):  # type: ignore[union-attr]
        if a.name == "dropout_p":
            return bool((args[i] if i < len(args) else node.kwargs.get(a.name, a.default_value)) == 0)
    return False


def graph_copy(graph: fx.Graph, without: Collection[fx.Node] = ()) -> fx.Graph:
    """Where the graph returns a node that is left out, the copy returns None."""
    copy = fx.Graph()
    copies: dict[fx.Node, Any] = dict.fromkeys(without)
    copy.output(copy.graph_copy(graph, copies)).meta = dict(graph.output_node().meta)
    return copy


def attributes(graph: fx.Graph, owner: Any) -> Iterator[tuple[fx.Node, Any]]:
    """What the graph reads from its module."""
    for node in graph.find_nodes(op="get_attr"):
        value = owner
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        yield node, value


def _caller_of(node: fx.Node) -> str | None:
    """The operator of higher order that a node is, by its name."""
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else None


class FallbackRuns:
    """Of one graph.

    One that ``redraws`` must draw the random numbers that another graph draws. Inductor draws a number by its seed and
    its place in the tensor, wherever it stands; op by op the seed is not looked at.

    Args:
        name: of the graph, for messages.
        graph: as ``pickled`` gives it.
    """

    def __init__(self, name: str, graph: bytes, redraws: bool) -> None:
        self._name, self._graph, self._redraws = name, graph, redraws
        # By the inputs' sizes: how often it has run op by op, or what was compiled.
        self._runs: dict[Any, int | Callable[[list[Any]], Sequence[Any]]] = {}
        self._compiles = True  # until it is tried in vain

    def prepare(self) -> None:
        """Makes what is on the device, which cannot be made while a CUDA graph is captured."""
        _ = self.module

    def run(self, args: list[Any], *, compiles: bool) -> Sequence[Any]:
        """The graph's results. ``args`` are emptied; ``compiles``: whether a compilation may begin now, not in a
        capture.

        Op by op at first: ranks that differ once need no second compilation. Random numbers are drawn by Inductor
        wherever that can be. Others would be as good for this graph, but they move the generator on by another step:
        what ranks draw alike later, they would not any more. WeftError: the graph must be compiled, and cannot be.
        """
        if self._redraws and not (compiles and self._compiles):
            raise WeftError(
                f"graph {self._name}: runs unfused, as ranks do not agree or a CUDA graph is captured, and draws "
                "random numbers that another graph draws, too, as for dropout that is recomputed; op by op it would "
                'draw others. FusionPass(agree="capture") or agree=False fuse it, where all ranks run the same graphs'
            )
        sizes = tuple(_kind_of(value) for value in args)
        run = self._runs.get(sizes, 0)
        if isinstance(run, int):
            if compiles and self._compiles and (self._draws or run >= _OP_BY_OP):
                run = self._compile(args)
            if len(self._runs) >= _KNOWN:
                self._runs.clear()
            self._runs[sizes] = run + 1 if isinstance(run, int) else run
        if isinstance(run, int):
            return fx.Interpreter(self.module).boxed_run(args)  # type: ignore[no-any-return]
        return run(args)

    def _compile(self, args: list[Any]) -> Any:
        """What was compiled; 0 if that cannot be."""
        from torch._inductor.compile_fx import compile_fx_inner  # takes seconds

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args]
        graph = unpickled(self._graph)
        try:
            with mode:  # what stands in graphs that it calls gets fake values, too
                graph = make_fx(graph)(*fakes)
            with compiling_fallback():
                return compile_fx_inner(graph, fakes)
        except Exception as e:
            self._compiles = False
            said = f"{type(e).__name__}: {e}"
            if self._redraws:
                raise WeftError(
                    f"graph {self._name}: cannot be compiled as it was, and op by op would draw other random numbers "
                    f"than the graph that draws them, too: {said}"
                ) from e
            _log.warning("graph %s: cannot be compiled as it was, and runs op by op: %s", self._name, said)
        return 0

    @cached_property
    def _draws(self) -> bool:
        """Whether it is compiled at its first run."""
        nodes = self.module.graph.nodes
        return self._redraws or any(calls(n, *DRAWS) or _caller_of(n) in _AT_ONCE for n in nodes)

    @cached_property
    def module(self) -> fx.GraphModule:
        return unpickled(self._graph)


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


@contextlib.contextmanager
def compiling_fallback() -> Iterator[None]:
    """What is compiled inside is a graph as it was: for the pass, too, where Inductor's settings name one for all that
    is compiled. It would be fused and ask once more, and its fallback graph be compiled in turn."""
    _state.in_fallback = True
    try:
        yield
    finally:
        _state.in_fallback = False


def is_fallback_graph() -> bool:
    """Whether what this thread compiles is a fallback graph."""
    return getattr(_state, "in_fallback", False)
