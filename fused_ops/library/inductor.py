"""What Inductor is told of the ops: they are collectives, which it leaves in the order of the graph.

Imported when a graph with an op of weft comes to Inductor (``compiled.py``), or the pass runs: Inductor takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import add_needs_realized_inputs, lowerings, register_lowering
from torch._inductor.virtualized import NullHandler, V
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from . import schema
from .communicating import COMMUNICATING, KEEPS, OF_REGISTERED, why_unordered

_wait = torch.ops._c10d_functional.wait_tensor.default
_STARTS = (schema.all_gather_start, schema.reduce_scatter_start)
_WAITS = (schema.all_gather_wait, schema.reduce_scatter_wait)
_clone, _as_strided = torch.ops.aten.clone.default, torch.ops.aten.as_strided.default


class _Constants(tuple[Any, ...]):
    """Arguments that are no tensors. Torch estimates how long a collective takes for the group that is the last one."""

    def __getitem__(self, index: Any) -> Any:
        if index == -1:
            return next((each for each in reversed(self) if isinstance(each, str)), None)
        return super().__getitem__(index)


class _Collective(ir._CollectiveKernel):
    """For the scheduler, which drops no collective and keeps all of them in the order of the graph."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.constant_args = _Constants(self.constant_args)


def lower_as_collective(op: OpOverload) -> None:
    """Has Inductor take the op for a collective from now on."""
    add_needs_realized_inputs(op)

    returned = op._schema.returns
    one = len(returned) == 1 and isinstance(returned[0].type, torch._C.TensorType)

    @register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        _refuse_unordered(str(op))
        if op in OF_REGISTERED:
            if _of_originals(V.graph.current_node):
                return ()
            _save_copies(V.graph.current_node)
        if op in _WAITS:
            args = (args[0], _operand_of(*args[:2]), *args[2:])
        _read_before(op, args)
        # One tensor is made like torch's own collectives make it: Inductor takes it for the result of one where a graph
        # waits for it, and where it reduces it in place.
        created = (_Collective.create_out_of_place if one else _Collective.create)(op, *args, **kwargs)
        if kwargs.get("placed") and op is schema.all_gather_wait:  # a buffer of the heap
            V.graph.never_reuse_buffers.add(created.get_name())  # type: ignore[union-attr]
        return tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, created)


def _read_before(op: OpOverload, args: Sequence[Any]) -> None:
    """What reads the memory that the op writes to gets its code before it. Inductor's fallback asks for that only once
    the op has its place: what is not realised by then would read after it."""
    for argument, given in zip(op._schema.arguments, args, strict=False):
        for tensor in tree_leaves(given) if argument.is_write else ():
            tensor.realize()
            V.graph.mark_buffer_mutated(tensor.get_name())


def _operand_of(started: Any, x: Any) -> Any:
    """What a start was lowered with. It is read until the wait, so both must have one buffer, also where ``x`` is no
    view of one and each use makes a copy."""
    start = V.graph.name_to_buffer.get(started.get_name())
    if not isinstance(start, _Collective) or start.op_overload not in _STARTS:
        return x
    (sent,) = start.inputs
    assert isinstance(sent, ir.IRNode)
    return ir.TensorBox(sent) if isinstance(sent, ir.BaseView) else ir.TensorBox.create(sent)


def _refuse_unordered(op: str) -> None:
    if (why := why_unordered()) is not None:
        raise RuntimeError(f"{op}: {why}, with which ranks may communicate in different orders")


def _of_originals(call: fx.Node) -> bool:
    """Whether a call was of copies of registered tensors, and is written anew after itself, of the tensors.

    What a tensor held before the call may be needed after it. torch then copies the tensor and calls the op with the
    copy. Peers write to the tensor itself, so here the copy becomes what is kept of it.
    """
    given: Any = call.args[0] if isinstance(call.args[0], list | tuple) else [call.args[0]]
    for i, tensor in enumerate(given):
        copy = _views_of(tensor)[-1]
        if copy.op in ("placeholder", "get_attr"):
            continue
        if copy.target is not _clone or not _keeps_old(copy):
            several = f"[{i}]" if isinstance(call.args[0], list | tuple) else ""
            raise RuntimeError(
                f"{call.target}: {call.target._schema.arguments[0].name}{several} is a tensor that the compiled graph "  # type: ignore[union-attr]
                "makes, must be a registered one that the graph is given"
            )
        _exchange(copy, call)
        V.graph.user_to_last_uses.clear()  # values are needed for longer than was found out before
        return True
    return False


def _keeps_old(copy: fx.Node) -> bool:
    """Whether it is torch's copy of all that an input's storage holds, whose new value is written back at the end."""
    (old,) = copy.all_input_nodes
    given, held = _views_of(old)[-1], old.meta["val"]
    is_all = held.dim() == 1 and held.untyped_storage().nbytes() == held.numel() * held.itemsize
    if given.op != "placeholder" or not is_all:
        return False
    return any(user.target is torch.ops.aten.copy_.default and user.args[0] is given for user in given.users)


def _exchange(copy: fx.Node, call: fx.Node) -> None:
    """From ``call`` on, which is written anew after itself, ``copy`` and what it is a copy of change places."""
    (old,) = copy.all_input_nodes
    graph, given, place = call.graph, _views_of(old)[-1], call
    later, node = {call}, call
    while (node := node.next).op != "root":
        later.add(node)

    def written(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
        nonlocal place
        with graph.inserting_after(place):
            place = graph.call_function(target, args, kwargs)
        place.meta = dict(like.meta)
        return place

    def strided(of: fx.Node, like: fx.Node) -> fx.Node:
        val = like.meta["val"]
        sizes, strides = ([_plain(n) for n in each] for each in (val.shape, val.stride()))
        return written(_as_strided, (of, sizes, strides, _plain(val.storage_offset())), {}, like)

    # What came before, and sizes, may be forgotten already: all is made once more.
    flat = strided(given, old)
    kept: dict[fx.Node, fx.Node] = {copy: flat}
    before = written(_clone, (flat,), {}, copy)

    def other(node: fx.Node) -> fx.Node:
        """What takes the place of a view of either."""
        if node not in kept:
            kept[node] = strided(flat if _views_of(node)[-1] is copy else before, node)
        return kept[node]

    def _is_of(node: fx.Node) -> bool:
        return node not in later and bool({given, copy}.intersection(_views_of(node)))

    changed = [node for node in graph.nodes if node in later and any(map(_is_of, node.all_input_nodes))]
    for node in changed:
        back = node.target is torch.ops.aten.copy_.default and node.args[0] is given  # written to the tensor
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: other(n) if _is_of(n) else n)
        if back:
            args = (given, *args[1:])
        if node is call:
            written(call.target, args, kwargs, call)
        else:
            node.args, node.kwargs = args, kwargs


def _plain(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _save_copies(call: fx.Node) -> None:
    """What a forward saves of a registered tensor for its backward: by then a peer may have written to it."""
    if V.graph.is_inference or V.graph.is_backward:
        return
    output = call.graph.output_node()
    tensors = {_views_of(node)[-1] for node in call.all_input_nodes}

    def saved(value: fx.Node) -> fx.Node:
        if _views_of(value)[-1] not in tensors:
            return value
        with call.graph.inserting_before(output):
            copy = call.graph.call_function(_clone, (value,))
        copy.meta = dict(value.meta)
        return copy

    output.args = fx.map_arg(output.args, saved)


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The node, and what it is a view of."""
    found = [node]
    while isinstance(found[-1].target, OpOverload) and found[-1].target.is_view:
        found.append(found[-1].all_input_nodes[0])
    return found


def refuse_in_lite_mode() -> None:
    """To be called with each fake result: in lite mode Inductor calls the ops as they are, and lowers none."""
    if config.fallback_by_default and not isinstance(V.graph, NullHandler):
        _refuse_unordered("an op of weft")


def _lower_wait() -> None:
    """No code for a wait that only keeps an op of weft: its result is there for all that follows on the stream."""
    as_before = lowerings[_wait]

    @register_lowering(_wait, type_promotion_kind=None)
    def lower(tensor: Any) -> Any:
        node = V.graph.current_node
        return tensor if isinstance(node, fx.Node) and KEEPS in node.meta else as_before(tensor)


def _is_of_input(x: Any) -> bool:
    below = x.data.unwrap_view() if isinstance(x.data, ir.BaseView) else x.data
    return isinstance(below.data if isinstance(below, ir.StorageBox) else below, ir.InputBuffer)


def _lower_as_strided() -> None:
    """An offset counts from the beginning of a storage, but generated code has an input's address. From 2.13 on torch
    subtracts an input's offset; before, an op would be called with memory after the tensor that it is given."""
    if hasattr(GraphLowering, "symbolic_sizes_strides_storage_offset"):
        return
    as_before = lowerings[_as_strided]

    @register_lowering(_as_strided, type_promotion_kind=None)
    def lower(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        node = V.graph.current_node
        if storage_offset is not None and node.target is _as_strided and _is_of_input(x):
            given = _views_of(node)[-1]
            if given.op == "placeholder":
                storage_offset = storage_offset - _plain(given.meta["val"].storage_offset())
        return as_before(x, size, stride, storage_offset)


def keep_in_order() -> None:
    """Has Inductor know all ops of COMMUNICATING, and those no more that are not in it any longer."""
    if _known.keys() == set(COMMUNICATING):
        return
    for op in COMMUNICATING:
        if op not in _known:
            _known[op] = lowerings.get(op)
            lower_as_collective(op)
    for op in _known.keys() - set(COMMUNICATING):
        before = _known.pop(op)
        if before is None:
            del lowerings[op]
        else:
            lowerings[op] = before


_known: dict[OpOverload, Any] = {}  # and how each was lowered before
keep_in_order()
_lower_wait()
_lower_as_strided()
