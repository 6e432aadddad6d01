"""Writes nodes into a graph, each with the value that its fake implementation gives.

``meta["val"]`` is all the metadata they get: more, such as what Inductor noted about the inputs of a replaced node,
would be wrong for them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .collectives import Collective
from .index_map import Digits, flat_dims, refined
from .nodes import LeftAlone, aten, is_val, val
from .sizes import Size, is_contiguous, known, same_shape


def value(target: Any, args: Any, kwargs: Any) -> Any:
    """What the fake implementation of ``target`` gives for nodes. LeftAlone: as ``call``."""
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = detect_fake_mode(torch.utils._pytree.tree_leaves((fake_args, fake_kwargs)))
    try:
        with mode or contextlib.nullcontext():
            return target(*fake_args, **fake_kwargs)
    except GuardOnDataDependentSymNode as e:
        raise LeftAlone(f"whether {target} takes its sizes depends on data") from e
    except (RuntimeError, TypeError, ValueError) as e:
        raise LeftAlone(f"{target} does not take what it would get: {e}") from e


def call(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of ``target`` before the given node. LeftAlone: it cannot be called with these arguments, or whether it
    can depends on data."""
    result = value(target, args, kwargs)
    # As tracers write them: Inductor of torch 2.11 takes no tuple of tensors to concatenate.
    args = tuple(list(arg) if isinstance(arg, tuple) else arg for arg in args)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta["val"] = result
    for created in _created:
        created.append(node)
    return node


def repeated(node: fx.Node, own: Callable[[fx.Node], Any], before: fx.Node) -> fx.Node:
    """The node's call before another node, of what ``own`` gives for its operands. LeftAlone: as ``call``."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), own)
    return call(before, node.target, *args, **kwargs)


_created: list[list[fx.Node]] = []


@contextlib.contextmanager
def created_nodes() -> Iterator[list[fx.Node]]:
    """The nodes that ``call`` inserts inside the body."""
    created: list[fx.Node] = []
    _created.append(created)
    try:
        yield created
    finally:
        _created.pop()


@contextlib.contextmanager
def undone_if_left() -> Iterator[None]:
    """Inside the body nodes are inserted, and none replaced: if it raises LeftAlone, the graph is as it was."""
    with created_nodes() as created:
        try:
            yield
        except LeftAlone:
            for node in created[::-1]:
                node.graph.erase_node(node)
            raise


def read_size(size: Size, before: fx.Node, near: Sequence[fx.Node]) -> fx.Node | None:
    """A node before the given one that is the size, read if need be; None if nothing has it. ``near`` as for shapes."""
    if (found := _holder(size, before, near)) is None:
        return None
    node, dim = found
    return node if dim is None else call(before, aten.sym_size.int, node, dim)


def _holder(size: Size, before: fx.Node, near: Sequence[fx.Node]) -> tuple[fx.Node, int | None] | None:
    """A node before the given one that is the size, or has it in the returned dimension."""

    def is_it(other: Any) -> bool:
        return isinstance(other, int | torch.SymInt) and known(other == size)

    inputs = list(itertools.takewhile(lambda n: n.op == "placeholder", before.graph.nodes))
    for node in inputs:
        if is_it(node.meta.get("val")):
            return node, None
    for node in (*near, *filter(is_val, inputs)):
        for dim, other in enumerate(val(node).shape):
            if is_it(other):
                return node, dim
    for node in itertools.takewhile(lambda n: n is not before, before.graph.nodes):
        if is_it(node.meta.get("val")):
            return node, None
    return None


def reshape_sizes(shape: Iterable[Size], before: fx.Node, near: Sequence[fx.Node] = ()) -> list[Any]:
    """``shape`` as the argument of a reshape before the given node. LeftAlone: a size is held by none.

    One symbolic size is left to the reshape. Others are read from nodes that hold them, or from the shape of the nodes
    ``near`` and of the graph's inputs.
    """
    result: list[Any] = list(shape)
    holders = {i: _holder(s, before, near) for i, s in enumerate(result) if isinstance(s, torch.SymInt)}
    # With a size of 0 what is left out could be anything.
    empty = any(known(size == 0) for size in result)
    left_out = None if empty else min(holders, key=lambda i: (holders[i] is not None, i), default=None)
    for i, holder in holders.items():
        if i == left_out:
            result[i] = -1
        elif holder is None:
            raise LeftAlone(f"no node holds the size {result[i]}")
        else:
            node, dim = holder
            result[i] = node if dim is None else call(before, aten.sym_size.int, node, dim)
    return result


def fused(before: fx.Node, op: Any, c: Collective, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of one of weft's ops in place of a collective, for as many ranks. ``args``: those before the group.
    LeftAlone: as ``call``."""
    return call(before, op, *args, c.group, **kwargs, group_size=c.world)


def reshape(node: fx.Node, shape: Sequence[Size], before: fx.Node, near: Sequence[fx.Node] = ()) -> fx.Node:
    """The node with this shape, in row-major order; the node itself where it has it."""
    if same_shape(val(node).shape, shape):
        return node
    return call(before, aten.reshape.default, node, reshape_sizes(shape, before, (node, *near)))


def make_contiguous(node: fx.Node, before: fx.Node) -> fx.Node:
    """The node, or a contiguous copy of it where it is not known to be contiguous."""
    if is_contiguous(val(node)):
        return node
    return call(before, aten.clone.default, node, memory_format=torch.contiguous_format)


def permute(node: fx.Node, permutation: Sequence[int], before: fx.Node) -> fx.Node:
    if list(permutation) == list(range(len(permutation))):
        return node
    return call(before, aten.permute.default, node, list(permutation))


def cast(node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    """The node, cast where it has another dtype."""
    if val(node).dtype == dtype:
        return node
    return call(before, torch.ops.prims.convert_element_type.default, node, dtype)


def rearrange(
    node: fx.Node,
    have: Iterable[Digits],
    want: Iterable[Digits],
    shape: Sequence[Size],
    before: fx.Node,
    near: Sequence[fx.Node] = (),
) -> fx.Node:
    """A node of dimensions ``have`` as one of dimensions ``want``, whose sizes are ``shape``; any strides. LeftAlone:
    it is not known how one is made from the other."""
    ours, theirs = refined(flat_dims(have), flat_dims(want))
    order = [ours.index(piece) for piece in theirs]
    if order != sorted(order):
        node = permute(reshape(node, [piece.size for piece in ours], before, near), order, before)
    return reshape(node, shape, before, near)


def hoist(nodes: Iterable[fx.Node], before: fx.Node) -> None:
    """Moves the nodes, in their order in the graph, to before the given one."""
    for node in sorted(nodes):
        before.prepend(node)


def put_in_place(new: Mapping[fx.Node, fx.Node], gone: Iterable[fx.Node] = ()) -> None:
    """Has what uses the old nodes use the new ones, also where these are made of the old; then erases what is gone."""
    for old, node in new.items():
        old.replace_all_uses_with(node, delete_user_cb=partial(operator.is_not, node))
    erase_unused(gone)


def erase_unused(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Erases those of the nodes that nothing uses, and then those that nothing uses any more; returns the others."""
    left = []
    for node in sorted(dict.fromkeys(nodes), reverse=True):
        if node.users:
            left.append(node)
        else:
            node.graph.erase_node(node)
    return left[::-1]
