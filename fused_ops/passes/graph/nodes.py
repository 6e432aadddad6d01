"""Nodes of a graph: what they call, what they are made of, and how reasons name them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import fx

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
# What keeps the elements in their row-major order: only the shape changes.
FLAT = {
    *RESHAPES,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}


class LeftAlone(Exception):
    """Why a collective is not fused."""


def is_val(node: Any) -> TypeGuard[fx.Node]:
    """Whether ``node`` is a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def val(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for the node's value: shape, strides, dtype, device."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise LeftAlone(f"{node.name} has no tensor value whose shape is known")
    return value


def memory(node: fx.Node) -> int:
    """The same for nodes that share memory."""
    return val(node).untyped_storage()._cdata


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """The gradients that a backward graph, or one of forward and backward, gets."""
    return [n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]


def after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward: all that depends on the gradients of the results."""
    return {*walk(tangents(graph), lambda n: (user for user in n.users if user.op != "output"))}


def walk(roots: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> dict[fx.Node, None]:
    """The roots, what follows them, and so on: each once, in the order met."""
    found = dict.fromkeys(roots)
    pending = [*found]
    for node in pending:
        new = dict.fromkeys(n for n in following(node) if n not in found)
        found |= new
        pending += new
    return found


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after ``first`` and before ``last``, in the order of the graph."""
    node = first.next
    while node is not last and node.op != "root":
        yield node
        node = node.next


def only_user(node: Any) -> Any:
    """The one user of a node, None if it has not one."""
    users = tuple(node.users) if isinstance(node, fx.Node) else ()
    return users[0] if len(users) == 1 else None


def used_by(node: Any, *targets: Any) -> Any:
    """The one user of a node, if it calls one of these; else None."""
    user = only_user(node)
    return user if calls(user, *targets) else None


def added_to(node: fx.Node, total: Any) -> Any:
    """What a sum of two adds to a node, as it is; None of what is no such sum, or twice the node."""
    if not calls(total, aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
        return None
    others = [term for term in total.args[:2] if term is not node]
    return others[0] if len(others) == 1 else None


def flattened(node: Any) -> Any:
    """What the node has the elements of, in this order."""
    while calls(node, *FLAT):
        node = node.args[0]
    return node


def what(node: fx.Node) -> str:
    """The node in words, for a reason."""
    if node.op == "output":
        return "the graph's output"
    if node.op != "call_function":
        return f"{node.name} ({node.op})"
    return f"{node.name} ({getattr(node.target, '__name__', node.target)})"


def some(nodes: Iterable[fx.Node]) -> str:
    names = [what(n) for n in nodes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_users(node: fx.Node, users: Collection[fx.Node]) -> None:
    """LeftAlone: others than these use the node."""
    if others := [u for u in node.users if u not in users]:
        raise LeftAlone(f"{what(node)} is also used by {some(others)}")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """What an operator is called with, by name."""
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """The argument at ``index``, given by position or as ``name``."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)
