"""A loss of gathered columns in its graph, on each rank's own columns."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ...library import schema
from ..graph.collectives import communicates
from ..graph.nodes import LeftAlone, aten, c10d, calls, check_no_write, val
from ..graph.rewrite import call, cast, erase_unused, fused, reshape, reshape_sizes, undone_if_left
from ..origin import put_for
from ..patterns.pattern import why_not_called_from_cpp
from .columns import GatheredColumns, step_on_columns
from .gradient import Path
from .softmax import Gradient, LogSoftmax

_iota = torch.ops.prims.iota.default


def put_on_columns(
    columns: GatheredColumns, sources: Mapping[fx.Node, fx.Node], softmax: LogSoftmax, paths: Sequence[Path]
) -> fx.Node:
    """Changes the graph.

    Args:
        sources: of what is between all columns and the log-softmax's, the input of each.
        paths: of ``softmax.gradients``.

    Returns:
        the op that now computes the loss.

    Raises:
        LeftAlone: the op does not take what it would get. The graph is as it was.
    """
    at, c = softmax.picked, columns.c
    if (why := why_not_called_from_cpp(schema.cross_entropy_of_sharded_logits)) is not None:
        raise LeftAlone(why)
    check_no_write(c.node, max([at, *(path.end for path in paths)]))
    ends: list[tuple[Path, fx.Node]] = []
    with undone_if_left():
        with put_for(at):
            x = _shard(softmax.x, columns, sources, at)
            targets = reshape(softmax.targets, val(softmax.targets).shape[:1], at)
            operands = x, None, None, targets
            op = fused(at, schema.cross_entropy_of_sharded_logits, c, *operands, vocab_start=columns.start)
            values = call(at, operator.getitem, op, 0)
            log_sum, score = (
                call(at, aten.unsqueeze.default, call(at, aten.select.int, values, 0, i), 1) for i in (0, 1)
            )
            picked = call(at, aten.sub.Tensor, score, log_sum)
        for gradient, path in zip(softmax.gradients, paths, strict=True):
            with put_for(path.end):
                ends.append((path, _own_gradient(gradient, path, columns, x, log_sum)))
    gone = made_of([softmax.picked, *(path.end for path in paths)])
    softmax.picked.replace_all_uses_with(picked)
    for path, own in ends:
        path.end.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)  # type: ignore[misc]
    for path in paths:
        if path.sums:
            first = path.sums[0]
            first.replace_all_uses_with(_rest(first, path))
    erase_unused(gone)
    _after(op, columns)
    return op


def _shard(
    node: fx.Node, columns: GatheredColumns, sources: Mapping[fx.Node, fx.Node], at: fx.Node
) -> fx.Node:
    if node is columns.whole:
        return columns.shard(at)
    return step_on_columns(node, _shard(sources[node], columns, sources, at), columns.width, at)


def _own_gradient(
    gradient: Gradient, path: Path, columns: GatheredColumns, x: fx.Node, log_sum: fx.Node
) -> fx.Node:
    """This rank's columns of ``scale * by * (onehot - softmax)``, and what is then made of them."""
    at, width = path.end, columns.width
    by = reshape(gradient.by, val(gradient.targets).shape, at)
    if path.summed:
        # Ranks have the same rows and targets; what their gradients are multiplied by may differ.
        pending = call(at, c10d.all_reduce.default, by, "sum", columns.c.group)
        by = call(at, c10d.wait_tensor.default, pending)
    p = call(at, aten.exp.default, call(at, aten.sub.Tensor, cast(x, [torch.float32], at), log_sum))
    named = {"start": columns.start, "step": 1, "dtype": torch.int64, "device": val(x).device}
    number = call(at, _iota, width, **named, requires_grad=False)
    here = call(at, aten.eq.Tensor, gradient.targets, call(at, aten.unsqueeze.default, number, 0))
    own = call(at, aten.where.self, here, call(at, aten.sub.Tensor, p, 1), p)
    node = call(at, aten.mul.Tensor, own, call(at, aten.mul.Tensor, by, -gradient.scale))
    for step in path.steps:
        if calls(step, aten.slice_scatter.default):
            sizes = reshape_sizes([*val(step).shape[:-1], width], at, [step])
            zeros = call(at, aten.full.default, sizes, 0, dtype=val(step).dtype, device=val(x).device)
            node = call(at, aten.slice_scatter.default, zeros, node, *step.args[2:])
        elif step not in path.sums:
            node = step_on_columns(step, node, width, at)
    return call(at.next, aten.add.Tensor, at, node) if path.sums else node


def _rest(add: fx.Node, path: Path) -> fx.Node:
    """What a sum adds to the gradient of the loss."""
    at = path.steps.index(add)
    source = path.steps[at - 1] if at else None
    a, b = add.args
    return a if b is source or (source is None and a not in path.steps) else b  # type: ignore[return-value]


def made_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are made of by calls."""
    found: set[fx.Node] = set()
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _after(op: fx.Node, columns: GatheredColumns) -> None:
    """A gather that stays begins after the loss's own exchange, which need not wait for it then."""
    c = columns.c
    kept = [n for n in (c.node, c.wait, *sorted(columns.between), columns.whole) if not n._erased]
    if c.node._erased or any(u not in kept and u < op for n in kept for u in n.users):
        return
    node = c.node.next
    while node is not op:
        if communicates(node):
            return
        node = node.next
    for node in kept[::-1]:
        op.append(node)
