"""Other spellings of a collective, brought into the one that the forms are found for."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed import ProcessGroup

from ...symm_mem.heap.registry import has_name
from .graph.collectives import collectives, communicates, waits
from .graph.nodes import RESHAPES, LeftAlone, aten, c10d, calls, is_val, used_by, val
from .graph.rewrite import call, erase_unused, read_size, undone_if_left
from .graph.sizes import alike, is_contiguous, known, same_shape
from .origin import copy_origin, put_for
from .patterns.pattern import Pattern

_COALESCED = {
    c10d.all_gather_into_tensor_coalesced.default: c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default: c10d.reduce_scatter_tensor.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce.default,
}
_OUT = {
    c10d.all_gather_into_tensor_out.default: c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor_out.default: c10d.reduce_scatter_tensor.default,
}
_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
_EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_strided.default)


def to_one_spelling(graph: fx.Graph) -> None:
    """What needs no knowledge of patterns."""
    by_position(graph)
    name_groups(graph)
    make_functional(graph)
    wait_for_each(graph)
    wait_once(graph)
    only_wait_for_pending(graph)
    reshape_before_reduced(graph)


def by_position(graph: fx.Graph) -> None:
    """Arguments that are given by name, and need not be, stand where the forms look for them."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.kwargs:
            continue
        args, kwargs = list(node.args), dict(node.kwargs)
        places = [a for a in node.target._schema.arguments if not a.kwarg_only]
        last = max((i for i, a in enumerate(places) if a.name in kwargs), default=-1)
        args += [kwargs.pop(a.name, a.default_value) for a in places[len(args) : last + 1]]
        node.args, node.kwargs = tuple(args), kwargs


def make_functional(graph: fx.Graph) -> None:
    """A collective whose ``out`` is new memory that nothing else uses becomes one that returns new memory."""
    for node in list(graph.nodes):
        target, given = _OUT.get(node.target), node.args  # type: ignore[call-overload]
        out: Any = node.kwargs.get("out")
        is_new = calls(out, *_EMPTY) and len(out.users) == 1 and is_contiguous(val(out))
        if calls(node, _FUNCTIONALIZED) and given[0] in _OUT:
            # torch.compile has found it to be new. What else the pass does knows no higher-order operator.
            target, is_new = _OUT[given[0]], node.kwargs.get("_all_bases") == []
            given = tuple(node.kwargs[a.name] for a in target._schema.arguments)
        if target is None or not is_new or not is_val(node) or not is_contiguous(val(node)):
            continue
        try:
            made = call(node, target, *given)
        except LeftAlone:
            continue
        if not alike(val(made), val(node)):
            graph.erase_node(made)
            continue
        copy_origin(node, made)
        node.replace_all_uses_with(made)
        erase_unused([node, *([out] if calls(out, *_EMPTY) else [])])


def name_groups(graph: fx.Graph) -> None:
    """A collective whose group is given as an object, as from torch 2.13 on, gets that one's name."""
    names: dict[fx.Node, str] = {}
    for given in graph.find_nodes(op="get_attr"):
        value = getattr(graph.owning_module, str(given.target), None)
        value = getattr(value, "real_obj", value)
        # Another group may have got the name since.
        if isinstance(value, ProcessGroup) and has_name(value, value.group_name):
            names[given] = str(value.group_name)
    for node in dict.fromkeys(user for given in names for user in given.users):
        # Functionalized operators of others may take no name.
        if communicates(node) or (calls(node, _FUNCTIONALIZED) and node.args[0] in _OUT):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: names.get(n, n))
    erase_unused(names)


def wait_for_each(graph: fx.Graph) -> None:
    """What is waited for at once, as torch 2.15 does with coalesced collectives, is waited for one by one."""
    for node in list(graph.nodes):
        # By its name: older torch has no such operator.
        if not waits(node) or calls(node, c10d.wait_tensor.default):
            continue
        pending, results = node.args[0], {r.args[1]: r for r in node.users if calls(r, operator.getitem)}
        of_coalesced = (
            calls(p, operator.getitem) and calls(p.args[0], *_COALESCED) and is_val(p) for p in pending
        )
        if len(results) != len(node.users) or not all(of_coalesced):
            continue
        for i, part in enumerate(pending):
            with graph.inserting_before(node):
                done = graph.call_function(c10d.wait_tensor.default, (part,))
            result = results.get(i)
            # What views the result, in its metadata, goes on to share that one's memory.
            done.meta["val"] = val(part if result is None else result)
            if result is not None:
                result.replace_all_uses_with(done)
                graph.erase_node(result)
        graph.erase_node(node)


def wait_once(graph: fx.Graph) -> None:
    """A tensor that was waited for already is the result of waiting for it. ``funcol.wait_tensor`` leaves that in a
    graph, where torch.compile lets a wait follow each collective anyway."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        source = node.args[0]
        done = first.setdefault(source, source if calls(source, c10d.wait_tensor.default) else node)
        if done is not node:
            node.replace_all_uses_with(done)
            graph.erase_node(node)


def only_wait_for_pending(graph: fx.Graph) -> None:
    """Where a pending tensor is waited for, nothing else uses it: who returns it returns what was waited for, and its
    sizes are read where they came from."""
    for node in list(collectives(graph)):
        wait = next((user for user in node.users if calls(user, c10d.wait_tensor.default)), None)
        if wait is None:
            continue
        for user in list(node.users):
            if user.op == "output":
                user.replace_input_with(node, wait)
            elif calls(user, aten.sym_size.int):
                with contextlib.suppress(LeftAlone), undone_if_left():
                    with put_for(user):
                        size = _size_of_pending(node, user)
                    user.replace_all_uses_with(size)
                    graph.erase_node(user)


def _size_of_pending(node: fx.Node, user: fx.Node) -> fx.Node:
    """The size that the user reads, before it. LeftAlone: nothing else tells it."""
    x: Any = node.args[0]
    dim: Any = user.args[1]
    gathers = calls(node, c10d.all_gather_into_tensor.default)
    # What is gathered stays. A product that is reduced would not.
    size = read_size(val(x).shape[dim], user, [x] if gathers else []) if is_val(x) else None
    if size is None:
        raise LeftAlone("nothing that stays has the size of what is sent")
    if dim == 0 and gathers:
        size = call(user, operator.mul, size, node.args[1])
    elif dim == 0 and calls(node, c10d.reduce_scatter_tensor.default):
        size = call(user, operator.floordiv, size, node.args[2])
    if not known(size.meta["val"] == user.meta["val"]):
        raise LeftAlone("another size")
    return size


def reshape_before_reduced(graph: fx.Graph) -> None:
    """What is reduced and then reshaped, row by row, is reshaped before: mixtures reduce their tokens as one list.

    The elements are the same, so are their places in memory. What is added and normed afterwards has one shape then.
    """
    for node in list(graph.find_nodes(op="call_function", target=c10d.all_reduce.default)):
        wait = used_by(node, c10d.wait_tensor.default)
        view = used_by(wait, *RESHAPES)
        if view is None or not is_val(node.args[0]):
            continue
        x, *rest = node.args
        before = [n for n in view.all_input_nodes if n is not wait]
        if not same_shape(val(x).shape[-1:], val(view).shape[-1:]) or not all(n < node for n in before):
            continue
        try:
            shaped = call(node, view.target, x, *view.args[1:], **view.kwargs)
            pending = call(node, node.target, shaped, *rest, **node.kwargs)
            new = call(wait, wait.target, pending)
        except LeftAlone:
            continue
        for old, made in ((node, pending), (wait, new), (view, shaped)):
            copy_origin(old, made)
        view.replace_all_uses_with(new)
        for old in (view, wait, node):
            graph.erase_node(old)


def take_coalesced_apart(
    graph: fx.Graph, find: Callable[[fx.Node], Pattern], why_not: Callable[[Pattern], str | None]
) -> dict[fx.Node, str]:
    """Takes coalesced collectives apart where all of them will be fused; gives why others stay. ``find``: the pattern
    of a collective; ``why_not``: why one that was found will not be used."""
    reasons: dict[fx.Node, str] = {}
    for node in [n for n in graph.nodes if calls(n, *_COALESCED)]:
        try:
            parts = _parts(node)
            _replace_if_fused(node, parts, find, why_not)
        except LeftAlone as e:
            reasons[node] = str(e)
            continue
        erase_unused([*parts, node])
    return reasons


def _replace_if_fused(
    at: fx.Node,
    parts: dict[fx.Node, fx.Node],
    find: Callable[[fx.Node], Pattern],
    why_not: Callable[[Pattern], str | None],
) -> None:
    """Puts collectives of the inputs in place of the ``parts`` of one. LeftAlone: not all of them are fused. The graph
    is as it was."""
    new: dict[fx.Node, fx.Node] = {}
    rest = at.args[1:]
    # Meanwhile it uses nothing, and does nothing that others must not be moved across.
    saved, after = (at.target, at.args, at.kwargs), at.next
    at.target, at.args, at.kwargs = operator.pos, (), {}
    try:
        for old, x in parts.items():
            new[old] = call(after, _COALESCED[saved[0]], x, *rest)  # type: ignore[index]
            copy_origin(at, new[old])
            old.replace_all_uses_with(new[old])
        for i, single in enumerate(new.values()):
            which = f"coalesced with others, of which number {i}: " if len(new) > 1 else ""
            try:
                reason = why_not(find(single))
            except LeftAlone as e:
                raise LeftAlone(f"{which}{e}") from e
            if reason is not None:
                raise LeftAlone(f"{which}{reason}")
    except LeftAlone:
        for old, single in new.items():
            single.replace_all_uses_with(old)
            single.graph.erase_node(single)
        at.target, at.args, at.kwargs = saved
        raise


def _parts(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """The results of a coalesced collective, and of what each is the result."""
    inputs: Any = node.args[0]
    results = {user.args[1]: user for user in node.users if calls(user, operator.getitem)}
    if len(results) != len(node.users) or results.keys() != {*range(len(inputs))}:
        raise LeftAlone("not each of its results is used once")
    return {results[i]: x for i, x in enumerate(inputs)}


def write_out(graph: fx.Graph) -> None:
    """Puts operators in place of what Inductor would lower by a function.

    A pattern of Inductor's that ends in a lowering leaves a Python function of its own in the graph. No form knows one,
    and a graph that has one is no text that could be kept for ranks that do not agree: nothing in it would be fused.
    With ``max_autotune`` each sum of two products becomes one, as of two column-parallel layers' gradients.
    """
    for node in list(graph.nodes):
        name = _name(node)
        if name == "splitwithsizes_cat_replace":
            new = node.kwargs["input_"]
        elif name == "cat_splitwithsizes_replace":
            # All that is joined and cut again where it was joined.
            for part in list(node.users):
                part.replace_all_uses_with(node.kwargs["input_"][part.args[1]])  # type: ignore[index, arg-type]
                graph.erase_node(part)
            graph.erase_node(node)
            continue
        elif name in _WRITERS:
            try:
                with undone_if_left():
                    new = _WRITERS[name](node)
            except LeftAlone:
                continue
            new.meta["stack_trace"] = node.meta.get("stack_trace")
        else:
            continue
        node.replace_all_uses_with(new)  # type: ignore[arg-type]
        graph.erase_node(node)


def _name(node: fx.Node) -> str:
    """Of the function that lowers what was matched here; "" where that is none of Inductor's."""
    if node.op != "call_function" or not isinstance(node.target, functools.partial):
        return ""
    fn = node.target.func
    return fn.__name__ if fn.__module__ == "torch._inductor.fx_passes.post_grad" else ""


def _sum_of_products(node: fx.Node) -> fx.Node:
    a, b, c, d = (node.kwargs[f"mat{i}"] for i in (1, 2, 3, 4))
    return call(node, aten.add.Tensor, call(node, aten.mm.default, a, b), call(node, aten.mm.default, c, d))


def _joined_once_more(node: fx.Node) -> fx.Node:
    given: Any = node.args[0]
    whole = call(node, aten.cat.default, list(given), 1)
    part = call(node, aten.slice.Tensor, whole, 1, 0, node.kwargs["size"])
    return call(node, aten.cat.default, [whole, part], 1)


_WRITERS = {"mm_plus_mm": _sum_of_products, "cat_slice_cat": _joined_once_more}
