"""What can be said of a node for certain.

Sizes may be symbolic. What is not known to be true is taken to be false, without a guard. Guards come only with what is
put in: what its fake implementation checks holds for the inputs that the graph is then used for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Size = Any  # int or torch.SymInt
# What keeps the elements in their row-major order: only the shape changes.
FLAT = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}


RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


class LeftAlone(Exception):
    """Why a collective is not fused."""


def known(fact: Any) -> bool:
    """Whether ``fact`` about sizes holds for every input that the graph may get."""
    return statically_known_true(fact)


def hint(size: Size) -> int:
    """What a size is in the example that the graph was made with. LeftAlone: it depends on data."""
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise LeftAlone(f"the size {size} depends on data")
    return int(size.node.hint)


def hint_or_one(size: Size) -> int:
    """The same; 1 for a size that depends on data."""
    return hint(size) if isinstance(size, int) or size.node.has_hint() else 1


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, as ``hint``."""
    return hint(tensor.numel()) * tensor.dtype.itemsize


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both have the same dtype and are known to have the same shape."""
    return a.dtype == b.dtype and same_shape(a.shape, b.shape)


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether the tensor is known to be contiguous."""
    return bool(is_contiguous_or_false(tensor))


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


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """The argument at ``index``, given by position or as ``name``."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


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
