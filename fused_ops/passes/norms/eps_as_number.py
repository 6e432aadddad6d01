"""A norm's eps as a number of the graph, where Dynamo has made it an input.

With ``dynamic=True`` an attribute such as ``self.eps`` is a tensor of one element, which no op takes: a rank would
learn its value at run time, and the others could not compare it. torch has a way to make such an input a number again:
Dynamo traces once more, with a guard on the value. That takes place here, before AOTAutograd and its caches see the
graph, so that their keys have the number.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..agreement.fallback.run import is_fallback_graph
from ..pass_sequence import in_sequence, passes_of

#: The option of Inductor for passes on Dynamo's graph.
EARLY_SLOT = "pre_grad_custom_pass"
_ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_ROOTS = {torch.rsqrt, torch.rsqrt_, "rsqrt", "rsqrt_"}


class EpsAsNumber(CustomGraphPass):
    """Has Dynamo trace again, once, if a number that is added under a root is an input. There is one, ``EPS``."""

    def __call__(self, graph: fx.Graph) -> None:
        names = {name for node in graph.nodes if (name := _input_of(node)) and _is_eps(node)}
        new = [name for name in sorted(names) if not TensorifyState.should_specialize(name)]
        if not new or is_fallback_graph():
            return
        for name in new:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis

    def uuid(self) -> Any:
        return "weft eps"

    def __reduce__(self) -> str:
        # torch.compile compares options: a copy is the same object.
        return "EPS"


EPS = EpsAsNumber()


def eps_options(options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Inductor's option for it, behind the passes that ``options``, or Inductor's configuration, have in its place."""
    others = passes_of(options.get(EARLY_SLOT, getattr(inductor_config, EARLY_SLOT)))
    return {EARLY_SLOT: in_sequence([*(each for each in others if each is not EPS), EPS])}


def _input_of(node: fx.Node) -> str | None:
    """The symbol that stands for the value of a node, where that is a float of the program's."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymFloat):
        return None
    expr = value.node._expr
    return expr.name if expr.is_Symbol and symbol_is_type(expr, SymT.FLOAT) else None


def _is_eps(node: fx.Node) -> bool:
    return any(add.target in _ADDS and any(root.target in _ROOTS for root in add.users) for add in node.users)
