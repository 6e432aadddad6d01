"""Nodes with effects, which others must not be moved across."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .nodes import LeftAlone, between, what

_lib = torch.library.Library("weft", "FRAGMENT")


def op_with_effect(schema: str, run: Callable[..., None]) -> Any:
    """An op of weft that returns nothing, and that no graph drops. Inductor lowers it to code; else ``run`` is run."""
    name, _, _ = schema.partition("(")
    _lib.define(f"{schema} -> ()")
    _lib.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", lambda *args: None, lib=_lib)
    op = getattr(torch.ops.weft, name).default
    fx.node.has_side_effect(op)
    return op


def custom_ops(graph: fx.Graph) -> Iterator[str]:
    """The names of operators that neither torch nor weft has defined: collectives of the user's own are among them."""
    return (str(n.target._schema.name) for n in graph.nodes if is_custom(n))


def is_custom(node: fx.Node) -> bool:
    """Whether the node calls an operator that neither torch nor weft has defined."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _OF_TORCH


_OF_TORCH = {"aten", "prims", "prim", "inductor", "rngprims", "quantized", "_c10d_functional", "weft"}


def writes(node: fx.Node) -> bool:
    """Whether the node writes to memory or has another effect: what reads memory must not be moved across it."""
    if node.op in ("call_module", "call_method"):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _EFFECTS


_EFFECTS = ("with_effects", "triton_kernel_wrapper_mutation", "call_torchbind")


def is_random(node: fx.Node) -> bool:
    """Whether the node takes from a generator, or may, so that it must keep its place among others that do."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True  # what is recomputed with the state of a generator, for one
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def first_write(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """The first node after ``first``, up to ``last``, that writes to memory."""
    return next(filter(writes, between(first, last.next)), None)


def check_no_write(first: fx.Node, last: fx.Node) -> None:
    """Between the two nodes, in graph order, nothing writes to memory: they can be moved against each other. LeftAlone:
    something does."""
    if (node := first_write(first, last)) is not None:
        raise LeftAlone(f"{what(node)} writes to memory between {first.name} and {last.name}")
