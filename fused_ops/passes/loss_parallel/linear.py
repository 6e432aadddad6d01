"""A loss of columns whose logits are a product that nothing else needs: they exist a chunk of rows at a time.

``linear_cross_entropy`` makes the gradients of both operands in the forward, of the sum of the rows' losses, and the
backward multiplies them. So all rows must have one factor, or be ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...library import schema
from ..graph.effects import writes
from ..graph.nodes import FLAT, LeftAlone, aten, calls, flattened, only_user, used_by, val, walk
from ..graph.rewrite import call, cast, fused, put_in_place, reshape, undone_if_left
from ..graph.sizes import known, same_shape
from ..origin import put_for
from .columns import CAST
from .replace import ColumnLoss, made_of, of_all_ranks
from .softmax import number_of

_MORE = "they are needed for more than the loss"


def put_on_product(loss: ColumnLoss) -> fx.Node:
    """Puts the op that computes the loss into the graph and gives it. LeftAlone: the logits are needed as they are. The
    graph is as it was."""
    at, c = loss.op, loss.columns.c
    logits = flattened(at.args[0])
    if not calls(logits, aten.mm.default) or val(logits).dtype not in (torch.float32, torch.bfloat16):
        raise LeftAlone("they are no product alone, of float32 or bfloat16")
    if len({*loss.columns.widths}) > 1:
        raise LeftAlone("some ranks fill theirs up, and all must choose alike")
    weight, _ = _matrix(logits.args[1])
    users = (user for node in walk([weight], _views) for user in node.users)
    # Each keeps a gradient of the weight until the backward.
    if loss.gradients and any(calls(user, schema.linear_cross_entropy) for user in users):
        raise LeftAlone("their weight is another loss's, too")
    named = {"vocab_start": at.kwargs["vocab_start"], "extra": at.kwargs["extra"]}
    total, products = at, {}
    targets: Any = at.args[3]
    if loss.gradients:
        total, targets, named["ignore_index"], factor = _one_factor(loss)
        products = _products(loss, logits)
        named |= {"summed": True, **dict.fromkeys(products, True)}
    replaced = [total, *products.values()]
    made = walk([logits], lambda n: (user for user in n.users if user not in replaced))
    if any(n.op == "output" or writes(n) for n in made):
        raise LeftAlone(_MORE)
    with undone_if_left():
        with put_for(at):
            operands = [logits.args[0], call(at, aten.permute.default, logits.args[1], [1, 0]), None]
            operands.append(reshape(targets, [val(logits).shape[0]], at))
            op = fused(at, schema.linear_cross_entropy, c, *operands, **named)
            new = [cast(call(at, operator.getitem, op, 0), val(total).dtype, at) if loss.gradients else op]
            all_units = call(at, operator.getitem, op, 2)
            units = [call(at, operator.getitem, all_units, i) for i in range(len(products))]
        if products:
            (gradient, path, _), first = loss.gradients[0], min(products.values())
            with put_for(first):
                factor = cast(reshape(factor, [1], first), torch.float32, first)
                factor = of_all_ranks(factor, c, first) if path.summed else factor
                factor = call(first, aten.mul.Tensor, factor, -gradient.scale)
                # The mean of no row is NaN, with gradients of 0.
                counts = call(first, aten.ne.Scalar, targets, named["ignore_index"])
                factor = call(
                    first, aten.where.ScalarOther, call(first, aten.any.default, counts), factor, 0.0
                )
        for old, unit in zip(products.values(), units, strict=True):
            with put_for(old):
                wide = call(old, aten.mul.Tensor, cast(unit, torch.float32, old), factor)
                # An infinite factor leaves the zeros of ignored rows.
                wide = call(old, aten.where.ScalarOther, call(old, aten.ne.Scalar, unit, 0), wide, 0.0)
                new.append(cast(wide, val(unit).dtype, old))
    put_in_place(dict(zip(replaced, new, strict=True)), made_of(replaced))
    return op


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Of the node, and of these."""
    return (user for user in node.users if calls(user, *FLAT, aten.permute.default))


def _one_factor(loss: ColumnLoss) -> tuple[fx.Node, fx.Node, int, fx.Node]:
    """(the sum of rows' losses, targets, the ignored one, the gradient of each other row's loss) LeftAlone: rows have
    factors of their own."""
    (gradient, path, _), *more = loss.gradients
    why = LeftAlone("its rows' losses are not only summed, or count differently")
    negated = only_user(loss.picked)
    while calls(negated, *FLAT):
        negated = only_user(negated)
    rows = only_user(negated)
    total = used_by(rows, aten.sum.default)
    found = [_masked(node) for node in (rows, gradient.by, gradient.targets, loss.op.args[3])]
    if path.sums:
        raise LeftAlone(_MORE)
    if None in found or len({mask for mask, _ in found}) > 1 or more or gradient.each is not None:
        raise why
    ((targets, ignored), value), (_, factor), *chosen = found
    if value is not negated or not calls(negated, aten.neg.default) or total is None or total.kwargs:
        raise why
    if any(flattened(each) is not targets for _, each in chosen) or not known(val(factor).numel() == 1):
        raise why
    return total, targets, ignored, factor


def _masked(node: Any) -> Any:
    """((targets, the ignored one), value) of a value of each row, or 0 where it is ignored; None of what is none."""
    node = flattened(node)
    if not calls(node, aten.where.self) or number_of(node.args[2]) != 0:
        return None
    counts = flattened(node.args[0])
    if not calls(counts, aten.ne.Scalar):
        return None
    return (flattened(counts.args[0]), counts.args[1]), node.args[1]


def _products(loss: ColumnLoss, logits: fx.Node) -> dict[str, fx.Node]:
    """Of the logits' gradient, in the order in which the op gives them. LeftAlone: it is used otherwise."""
    _, path, own = loss.gradients[0]
    dtypes = {val(step).dtype for step in path.steps} - {torch.float32, val(logits).dtype}
    if dtypes or not all(calls(step, CAST, *FLAT) for step in path.steps):
        raise LeftAlone("their gradient is changed")
    operands: Any = logits.args
    (x, right), (weight, turned) = operands, _matrix(operands[1])
    wanted = {
        "of_x": ((flattened(own), False), (weight, not turned), val(x).shape),
        "of_weight": ((flattened(own), True), _matrix(x), val(right).shape[::-1]),
    }
    found: dict[str, fx.Node] = {}
    for node in walk([own], _views):
        for user in node.users.keys() - {*_views(node)}:
            parts = tuple(map(_matrix, user.args)) if calls(user, aten.mm.default) else ()
            names = [name for name, (*both, shape) in wanted.items() if parts == tuple(both)]
            if not names or names[0] in found or not same_shape(val(user).shape, wanted[names[0]][2]):
                raise LeftAlone("their gradient is not only multiplied by x and the weight")
            found[names[0]] = user
    return {name: found[name] for name in wanted if name in found}


def _matrix(node: Any) -> tuple[fx.Node, bool]:
    """(what the node has the elements of, whether it is transposed)."""
    turned = False
    while True:
        if calls(node, aten.permute.default) and node.args[1] == [1, 0]:
            turned = not turned
        elif not calls(node, *FLAT) or not same_shape(val(node).shape, val(node.args[0]).shape):
            return flattened(node), turned
        node = node.args[0]
