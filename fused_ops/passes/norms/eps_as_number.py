"""A norm's eps as a number of the graph, where Dynamo has made it an input.

With ``dynamic=True`` an attribute such as ``self.eps`` is a tensor of one element, which no op takes: a rank would
learn its value at run time, and the others could not compare it. Here it becomes a number, with Dynamo's guard on the
value, as without ``dynamic``. That takes place before AOTAutograd and its caches see the graph, so that their keys have
the number.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..pass_sequence import in_sequence, passes_of

#: The option of Inductor for passes on Dynamo's graph.
EARLY_SLOT = "pre_grad_custom_pass"
#: That for when these run; from torch 2.13, whose default is after the look into a cache.
_TIMING = "pre_grad_pass_timing"
_ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_ROOTS = {torch.rsqrt, torch.rsqrt_, "rsqrt", "rsqrt_"}


class EpsAsNumber(dict[str, Any], CustomGraphPass):
    """Takes the value of what is added under a root, if that is an input. There is one of this class, ``EPS``.

    A dict, of nothing, for json alone, as ``PassSettings`` is.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in [n for n in graph.nodes if _is_input(n) and _is_eps(n)]:
            value = node.meta["example_value"]
            if value.node.shape_env.frozen:  # takes no more guards
                continue
            node.replace_all_uses_with(guard_scalar(value))
            if node.op != "placeholder":
                graph.erase_node(node)

    def uuid(self) -> Any:
        return "weft eps"

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __reduce__(self) -> str:
        # torch.compile compares options: a copy is the same object.
        return "EPS"


EPS = EpsAsNumber()


def eps_options(options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Inductor's options for it, after the passes that ``options``, or Inductor's configuration, have in its place."""
    others = passes_of(options.get(EARLY_SLOT, getattr(inductor_config, EARLY_SLOT)))
    timing = {_TIMING: "early"} if hasattr(inductor_config, _TIMING) else {}
    return {EARLY_SLOT: in_sequence([*(each for each in others if each is not EPS), EPS]), **timing}


def _is_input(node: fx.Node) -> bool:
    """Whether a node is a float of the program's, and not computed."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymFloat):
        return False
    expr = value.node._expr
    return bool(expr.is_Symbol) and symbol_is_type(expr, SymT.FLOAT)


def _is_eps(node: fx.Node) -> bool:
    return any(add.target in _ADDS and any(root.target in _ROOTS for root in add.users) for add in node.users)
