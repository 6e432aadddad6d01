"""A call of an op as text: its tensors' sizes, strides and dtypes, and whatever else it takes.

Inductor's cache keeps it with the graph, and any rank may take it from there: it says nothing of a rank or of a GPU's
number.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ....kernels.device.jit.ahead import CompilableProgram
from ...dispatch.choice import CHOOSERS, choice_of_call
from ...dispatch.plan import Plan
from ..graph.nodes import hint

_TENSOR, _DTYPE = "tensor", "dtype"


def is_planned(node: fx.Node) -> bool:
    """Whether a node calls an op of weft that sends, and so has a plan."""
    return node.op == "call_function" and node.target in CHOOSERS


def text_of_call(node: fx.Node) -> str:
    """The call of a node, symbolic sizes as they are now. LeftAlone: one of them depends on data. TypeError: it takes
    something else."""
    args = node.args, node.kwargs
    return json.dumps([str(node.target._schema.name), *map(_as_json, args)])  # type: ignore[union-attr]


def _as_json(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _as_json(value.meta["val"])
    if isinstance(value, Tensor):
        sizes = [[*map(hint, value.shape)], [*map(hint, value.stride())]]
        return {_TENSOR: [*sizes, _name_of(value.dtype), value.device.type]}
    if isinstance(value, torch.dtype):
        return {_DTYPE: _name_of(value)}
    if isinstance(value, list | tuple):
        return [*map(_as_json, value)]
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, torch.SymInt):
        return hint(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"an argument is of type {type(value).__name__}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def planned_text(text: str) -> tuple[Plan, list[CompilableProgram]]:
    """How a call would run here, and the programs that it would launch. Nothing is loaded, launched or sent. It raises
    what the call would raise."""
    name, args, kwargs = json.loads(text)
    op = getattr(torch.ops.weft, name.removeprefix("weft::")).default
    # A compiler may have a mode of its own, and what makes programs looks at parts of operands.
    with unset_fake_temporarily(), FakeTensorMode():
        plan, choice = choice_of_call(op, _from_json(args), _from_json(kwargs))
        return plan, [*choice.programs()]


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_from_json, value)]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_DTYPE}:
        return getattr(torch, value[_DTYPE])
    if value.keys() == {_TENSOR}:
        sizes, strides, dtype, kind = value[_TENSOR]
        return torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device=kind)
    return {key: _from_json(each) for key, each in value.items()}
