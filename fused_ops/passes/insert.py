"""Writes nodes into a graph, each with the value that its fake implementation gives.

``meta["val"]`` is all the metadata they get: more, such as what Inductor noted about the inputs of a replaced node,
would be wrong for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from .match import LeftAlone, Size, aten, contiguous, is_val, known, same_shape, val


def call(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of ``target`` before the given node."""

    def value(node: fx.Node) -> Any:
        return node.meta["val"]

    fake_args, fake_kwargs = fx.map_arg(args, value), fx.map_arg(kwargs, value)
    mode = detect_fake_mode(torch.utils._pytree.tree_leaves((fake_args, fake_kwargs)))
    if mode is None:
        result = target(*fake_args, **fake_kwargs)
    else:
        with mode:
            result = target(*fake_args, **fake_kwargs)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta["val"] = result
    return node


def _holder(
    size: torch.SymInt, before: fx.Node, near: Sequence[fx.Node]
) -> tuple[fx.Node, int | None] | None:
    """A node before the given one that is the size, or has it in the returned dimension."""

    def is_it(other: Any) -> bool:
        return isinstance(other, torch.SymInt) and known(other == size)

    inputs = []
    for node in before.graph.nodes:
        if node is before:
            break
        if is_it(node.meta.get("val")):
            return node, None
        if node.op == "placeholder" and is_val(node):
            inputs.append(node)
    for node in (*near, *inputs):
        for dim, other in enumerate(val(node).shape):
            if is_it(other):
                return node, dim
    return None


def sizes(shape: Iterable[Size], before: fx.Node, near: Sequence[fx.Node] = ()) -> list[Any]:
    """``shape`` as the argument of a reshape before the given node.

    One symbolic size is left to the reshape. Others are read from nodes that hold them, or from the shape of the
    nodes ``near`` and of the graph's inputs.

    Raises:
        LeftAlone: a size is held by none.
    """
    result: list[Any] = list(shape)
    holders = {i: _holder(s, before, near) for i, s in enumerate(result) if isinstance(s, torch.SymInt)}
    # With a size of 0 what is left out could be anything.
    left_out = (
        min(holders, key=lambda i: (holders[i] is not None, i), default=None) if 0 not in result else None
    )
    for i, holder in holders.items():
        if i == left_out:
            result[i] = -1
        elif holder is None:
            raise LeftAlone(f"no node holds the size {result[i]}")
        else:
            node, dim = holder
            result[i] = node if dim is None else call(before, aten.sym_size.int, node, dim)
    return result


def reshape(node: fx.Node, shape: Sequence[Size], before: fx.Node, near: Sequence[fx.Node] = ()) -> fx.Node:
    """The node with this shape, in row-major order and contiguous, where it has or is not known to have it."""
    value = val(node)
    if same_shape(value.shape, shape) and contiguous(value):
        return node
    if same_shape(value.shape, shape):
        return call(before, aten.clone.default, node, memory_format=torch.contiguous_format)
    return call(before, aten.reshape.default, node, sizes(shape, before, near))


def erase_unused(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Erases those of the nodes that nothing uses, and then those that nothing uses any more; returns the others."""
    left = list(dict.fromkeys(nodes))
    progress = True
    while progress:
        progress = False
        for node in left[::-1]:
            if not node.users:
                node.graph.erase_node(node)
                left.remove(node)
                progress = True
    return left
