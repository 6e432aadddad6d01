"""Graphs that a fallback graph calls, as text: the functions of FlexAttention, branches, loops and nested regions.

Operators of higher order take them as modules. From its text a graph becomes such a module again: it is run once with
proxies, which write down what it calls. The same makes the whole graph one for Inductor. Dynamo would not: it takes the
operators in the form in which a program calls them, not in the one that it makes of them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

#: Operators that call graphs, and which run op by op as well as compiled.
CALLERS = ("cond", "while_loop", "invoke_subgraph", "flex_attention", "flex_attention_backward")
#: Op by op they write out all scores: a graph that calls them is compiled before it runs.
_AT_ONCE = ("flex_attention", "flex_attention_backward")
_COMPILED_FOR = 8  # inputs of different sizes for which one graph is kept compiled

#: A graph that is called: how many inputs it has, its text, and the graphs that it calls by their names.
CalledGraph = tuple[int, str, Mapping[str, Any]]


class KeptGraph(NamedTuple):
    """A fallback graph.

    Attributes:
        code: its text; None if nothing was fused.
        called: the graphs that it calls.
        constants: its tensors.
        redraws: whether it draws random numbers that another graph draws, too, from the same seed.
        seeds: the text of what draws seeds first, which are the last inputs of ``code``; None where nothing is.
    """

    code: str | None
    called: Mapping[str, CalledGraph]
    constants: Mapping[str, torch.Tensor]
    redraws: bool = False
    seeds: str | None = None

    def packed(self) -> dict[str, Any]:
        """For json; the constants as ``torch.save`` makes them, in base 64."""
        buffer = io.BytesIO()
        torch.save(self.constants, buffer)
        constants = base64.b64encode(buffer.getvalue()).decode() if self.constants else None
        return {**self._asdict(), "constants": constants}


def call_operator(name: str, *args: Any, **kwargs: Any) -> Any:
    """What stands for ``torch.ops.higher_order.<name>`` in the text: some of them look at their arguments' types, and
    would refuse proxies."""
    op = getattr(torch.ops.higher_order, name)
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, fx.Proxy):
            return value.tracer.create_proxy("call_function", op, args, kwargs)
    return op(*args, **kwargs)


def calls_by_name(graph: fx.Graph) -> None:
    """Has ``call_operator`` stand for the operators of ``CALLERS``."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in CALLERS:
            node.args = (node.target.name(), *node.args)
            node.target = call_operator


def function_of(code: str) -> Callable[..., Any]:
    """The ``forward`` of a text."""
    scope = {name: b.obj for name, b in fx.graph._custom_builtins.items()}
    exec(compile(code, "<fallback graph>", "exec"), scope)
    return scope["forward"]  # type: ignore[return-value]


class _Attributes:
    """What a graph's text reads from its module, as proxies."""

    def __init__(self, graph: fx.Graph, tracer: fx.proxy.TracerBase) -> None:
        self._graph, self._tracer = graph, tracer

    def __getattr__(self, name: str) -> fx.Proxy:
        return fx.Proxy(self._graph.get_attr(name), self._tracer)


def module_from_text(called: CalledGraph, constants: Mapping[str, Any]) -> fx.GraphModule:
    """The graph of a text, with its constants and the graphs that it calls as attributes."""
    inputs, code, graphs = called
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = [fx.Proxy(graph.placeholder(f"arg{i}"), tracer) for i in range(inputs)]
    outputs = function_of(code)(_Attributes(graph, tracer), proxies)
    graph.output(tracer.create_arg(outputs))
    return fx.GraphModule({**constants, **modules_from_text(graphs)}, graph)


def modules_from_text(graphs: Mapping[str, CalledGraph]) -> dict[str, fx.GraphModule]:
    return {name: module_from_text(called, {}) for name, called in graphs.items()}


class CallingGraph:
    """A fallback graph that calls others."""

    def __init__(self, code: str, graphs: Mapping[str, CalledGraph], constants: Mapping[str, Any]) -> None:
        self._code, self._graphs, self._constants = code, graphs, constants
        self._run = function_of(code)
        self._namespace = SimpleNamespace(**constants, **modules_from_text(graphs))
        self._compiled: dict[Any, Callable[..., Sequence[Any]]] = {}
        self.at_once = any(
            f"call_operator('{name}'" in text for text in _texts(code, graphs) for name in _AT_ONCE
        )

    def op_by_op(self, args: list[Any]) -> Sequence[Any]:
        """Empties ``args``."""
        return self._run(self._namespace, args)  # type: ignore[no-any-return]

    def compiled(self, args: list[Any]) -> Sequence[Any]:
        """Empties ``args``, but for an exception while it is compiled, before anything has run.

        Raises:
            CannotCompile: Inductor does not compile it.
        """
        key = tuple(_kind_of(value) for value in args)
        run = self._compiled.get(key)
        if run is None:
            try:
                module = module_from_text((len(args), self._code, self._graphs), self._constants)
                run = torch._inductor.compile(module, list(args))
            except Exception as e:
                raise CannotCompile(f"{type(e).__name__}: {e}") from e
            if len(self._compiled) == _COMPILED_FOR:
                self._compiled.clear()
            self._compiled[key] = run  # type: ignore[assignment]
        given = list(args)
        args.clear()
        return run(*given)  # type: ignore[no-any-return, operator, misc]


def _texts(code: str, graphs: Mapping[str, CalledGraph]) -> Iterator[str]:
    yield code
    for _, of_called, more in graphs.values():
        yield from _texts(of_called, more)


class CannotCompile(Exception):
    """Inductor does not compile a fallback graph."""


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value
