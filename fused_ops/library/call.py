"""Calls of ops by the public functions."""

from __future__ import annotations

from typing import Any

import torch

from ...symm_mem import Group, group_name
from .. import validation
from ..dispatch.callers import of_graph, of_rank_in_graph
from ..ops import OPS
from . import schema


def _kinds(op: Any) -> dict[str, tuple[str, bool]]:
    """Of each argument its type, and whether it may be None."""
    kinds = {}
    for argument in op.overload._schema.arguments:
        kind = argument.real_type  # by the other one a dtype is an integer
        optional = isinstance(kind, torch.OptionalType)
        kinds[argument.name] = str(kind.getElementType() if optional else kind), optional
    return kinds


_LARGE = (1 << 63) - 1
_KINDS = {schema.python_name(op): _kinds(op) for op in OPS}


def call_op(op: str, group: Group, *given: Any, **named: Any) -> Any:
    """``schema.op``, with the arguments before the group's name, and those after it by their names.

    What would not reach the op's own checks is refused: what is no tensor, number or flag where the schema has one.
    """
    kinds = _KINDS[op]
    for argument, value in [*zip(kinds, given), *named.items()]:  # noqa: B905  # less are given
        kind, optional = kinds[argument]
        if optional and value is None:
            continue
        # What is of the very type is asked no further: each function called here costs a call.
        if kind == "Tensor":
            validation.tensor(argument, value)
        elif kind == "int" and (type(value) is not int or abs(value) > _LARGE):
            validation.integer(argument, value)
        elif kind == "float" and type(value) is not float:
            validation.number(argument, value)
        elif kind == "bool" and type(value) is not bool:
            validation.flags(**{argument: value})
    name = group_name(group)
    if op == "gather" or "counts" in named:
        named |= of_rank_in_graph(name)
    return getattr(schema, op)(*given, name, **named, **of_graph(name))
