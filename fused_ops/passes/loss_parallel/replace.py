"""A loss of gathered columns in its graph, on each rank's own columns."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...library import schema
from ..graph.collectives import Collective, communicates
from ..graph.effects import check_no_write
from ..graph.nodes import LeftAlone, aten, between, c10d, calls, val, walk
from ..graph.rewrite import call, cast, fused, put_in_place, reshape, reshape_sizes, undone_if_left
from ..origin import put_for
from ..patterns.pattern import why_not_called_from_cpp
from .columns import GatheredColumns, OwnColumns, has_columns
from .gradient import Path
from .softmax import Gradient, LogSoftmax

_iota = torch.ops.prims.iota.default


class ColumnLoss(NamedTuple):
    """A loss of each rank's own columns; each gradient with its way to these, and what they are now."""

    columns: GatheredColumns
    op: fx.Node  # of logits [..., own columns]
    log_sum: fx.Node  # [..., 1]
    picked: fx.Node  # log-probabilities of targets, [..., 1]
    gradients: Sequence[tuple[Gradient, Path, fx.Node]]


def put_on_columns(columns: GatheredColumns, softmax: LogSoftmax, paths: Sequence[Path]) -> ColumnLoss:
    """Puts the loss of own columns into the graph. ``paths``: of ``softmax.gradients``. LeftAlone: the op does not take
    what it would get. The graph is as it was."""
    at, c = softmax.picked, columns.c
    check_no_write(c.node, max([at, *(path.end for path in paths)]))
    own_of, gradients = OwnColumns(columns), []
    with undone_if_left():
        with put_for(at):
            x = own_of.narrow(softmax.x, at)
            named = {"vocab_start": columns.start, "extra": "" if softmax.total is None else "mean"}
            op, (log_sum, *more), picked = exchanged(at, c, x, softmax.targets, **named)
            picked = cast(picked, val(softmax.picked).dtype, at)
            replaced = {softmax.picked: _signed(picked, softmax.sign, at)}
            if softmax.total is not None:
                mean = call(at, aten.sub.Tensor, more[1], log_sum)
                total = call(at, aten.mul.Tensor, mean, softmax.sign * sum(columns.widths))
                total = cast(total, val(softmax.total).dtype, at)
                replaced[softmax.total] = reshape(total, val(softmax.total).shape, at)
        for gradient, path in zip(softmax.gradients, paths, strict=True):
            with put_for(path.end):
                replaced[path.end] = _own_part(gradient, path, own_of, x, log_sum)
                gradients.append((gradient, path, replaced[path.end]))
    gone = made_of([*replaced])
    for gradient, path in zip(softmax.gradients, paths, strict=True):
        for first in path.sums[:1]:
            passed = (gradient.result, *path.steps)
            a, b = first.args
            first.replace_all_uses_with(a if b is passed[passed.index(first) - 1] else b)  # type: ignore[arg-type]
    put_in_place(replaced, gone)
    _after(op, columns)
    return ColumnLoss(columns, op, log_sum, replaced[softmax.picked], gradients)


def exchanged(
    at: fx.Node, c: Collective, x: fx.Node, targets: fx.Node, **named: Any
) -> tuple[fx.Node, list[fx.Node], fx.Node]:
    """Before a node the op on own columns x [..., columns], its statistics, and the targets' log-probabilities.
    LeftAlone: it does not take them."""
    if (why := why_not_called_from_cpp(schema.cross_entropy_of_sharded_logits)) is not None:
        raise LeftAlone(why)
    lead = val(targets).shape[:-1]
    op = fused(
        at, schema.cross_entropy_of_sharded_logits, c, x, None, None, reshape(targets, lead, at), **named
    )
    values = call(at, aten.unsqueeze.default, call(at, operator.getitem, op, 0), 2)
    rows = [call(at, aten.select.int, values, 0, i) for i in range(val(values).shape[0])]
    rows = [reshape(row, [*lead, 1], at, [targets]) for row in rows]
    return op, rows, call(at, aten.sub.Tensor, rows[1], rows[0])


def of_all_ranks(node: fx.Node, c: Collective, before: fx.Node) -> fx.Node:
    """Over the ranks."""
    pending = call(before, c10d.all_reduce.default, node, "sum", c.group)
    return call(before, c10d.wait_tensor.default, pending)


def _signed(node: fx.Node, sign: int, before: fx.Node) -> fx.Node:
    return node if sign > 0 else call(before, aten.neg.default, node)


def _own_part(gradient: Gradient, path: Path, own_of: OwnColumns, x: fx.Node, log_sum: fx.Node) -> fx.Node:
    """This rank's columns of the gradient, and what is then made of them.

    ``scale * by * (onehot - softmax) + each * (1 - columns * softmax)``
    """
    at, columns = path.end, own_of.columns
    by = cast(reshape(gradient.by, val(gradient.targets).shape, at), torch.float32, at)
    each = None if gradient.each is None else cast(gradient.each, torch.float32, at)
    if path.summed:
        # Ranks have the same rows and targets; what their gradients are multiplied by may differ.
        by = of_all_ranks(by, columns.c, at)
        each = None if each is None else of_all_ranks(each, columns.c, at)
    each = None if each is None else _signed(each, gradient.sign, at)
    p = call(at, aten.exp.default, call(at, aten.sub.Tensor, cast(x, torch.float32, at), log_sum))
    named = {"start": columns.start, "step": 1, "dtype": torch.int64, "device": val(x).device}
    number = call(at, _iota, columns.width, **named, requires_grad=False)
    here = call(at, aten.eq.Tensor, gradient.targets, call(at, aten.unsqueeze.default, number, 0))
    own = call(at, aten.where.self, here, call(at, aten.sub.Tensor, p, 1), p)
    node = call(at, aten.mul.Tensor, own, call(at, aten.mul.Tensor, by, -gradient.scale))
    if each is not None:
        rest = call(at, aten.sub.Tensor, 1, call(at, aten.mul.Tensor, p, sum(columns.widths)))
        node = call(at, aten.add.Tensor, node, call(at, aten.mul.Tensor, rest, each))
    return follow(path, node, gradient.result, own_of)


def follow(path: Path, node: fx.Node, last: fx.Node, own_of: OwnColumns) -> fx.Node:
    """What a path makes of ``last``, of this rank's columns of that, ``node``."""
    at, columns = path.end, own_of.columns
    for step in path.steps:
        if calls(step, aten.slice_scatter.default):
            sizes = reshape_sizes([*val(step).shape[:-1], columns.width], at, [step])
            zeros = call(at, aten.full.default, sizes, 0, dtype=val(step).dtype, device=val(node).device)
            node = call(at, aten.slice_scatter.default, zeros, node, *step.args[2:])
        elif step not in path.sums:
            own = {a: node if a is last else own_of.of(a, at) for a in step.args if has_columns(a)}
            node = own_of.step(step, own, at)
        last = step
    return call(at.next, aten.add.Tensor, at, node) if path.sums else node


def made_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are made of by calls."""
    return {n for n in walk(nodes, lambda n: n.all_input_nodes) if n.op == "call_function"}


def _after(op: fx.Node, columns: GatheredColumns) -> None:
    """A gather that stays begins after the loss's own exchange, which need not wait for it then."""
    c = columns.c
    kept = [n for n in (c.node, c.wait, *sorted(columns.between), columns.whole) if not n._erased]
    if c.node._erased or any(u not in kept and u < op for n in kept for u in n.users):
        return
    if any(map(communicates, between(c.node, op))):
        return
    for node in kept[::-1]:
        op.append(node)
