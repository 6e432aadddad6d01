"""A cross entropy of columns that the ranks share, as DTensor's ``loss_parallel`` computes it: by three all-reduces.

shifted = x - all_reduce(amax(x), max); log_probs = shifted - log(all_reduce(sum(exp(shifted)), sum))
picked = all_reduce(where(outside, 0, gather(log_probs, where(outside, 0, targets - start))), sum)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.collectives import Collective
from ..graph.effects import check_no_write
from ..graph.nodes import LeftAlone, aten, c10d, calls, only_user, used_by, val
from ..graph.rewrite import call, erase_unused, undone_if_left
from ..graph.row_wise import reduces_rows
from ..graph.sizes import known
from ..origin import put_for
from .columns import uncast
from .replace import exchanged, made_of
from .softmax import log_probs_of, number_of


@dataclass(frozen=True)
class ShardedLoss:
    """
    Attributes:
        c: the first all-reduce, of maxima.
        x: [M, columns of this rank], float32.
        log_probs: of these columns.
        own: [M, 1]: those of targets, where they are this rank's.
        picked: [M, 1]: those of targets, of all ranks.
        targets: [M, 1], columns of the whole vocabulary.
        start: this rank's first column.
        later: the other two all-reduces.
    """

    c: Collective
    x: fx.Node
    log_probs: fx.Node
    own: fx.Node
    picked: fx.Node
    targets: fx.Node
    start: int
    later: tuple[fx.Node, fx.Node]


def sharded_loss(c: Collective) -> ShardedLoss | None:
    """That whose maxima an all-reduce reduces. LeftAlone: more than targets' log-probabilities is needed."""
    amax: Any = c.x
    if c.reduce_op != "max" or not calls(amax, aten.amax.default):
        return None
    x, sums = amax.args[0], []

    def of_all(total: fx.Node) -> fx.Node | None:
        if (found := _summed(total, c)) is None:
            return None
        sums.append(found[0])
        return found[1]

    if not reduces_rows(amax, aten.amax.default, x) or (log_probs := log_probs_of(x, c.wait, of_all)) is None:
        return None
    if val(x).dim() != 2 or val(x).dtype != torch.float32:
        raise LeftAlone(
            f"its log-softmax is of {val(x).dim()} dimensions in {val(x).dtype}, not of rows in float32"
        )
    picks = [u for u in log_probs.users if calls(u, aten.gather.default) and u.args[:2] == (log_probs, 1)]
    if len(picks) != 1 or not known(val(picks[0]).shape[1] == 1):
        raise LeftAlone("of its log-softmax not one target's in each row is used")
    kept: Any = only_user(picks[0])
    of_own, of_index = _zeroed(kept), _zeroed(picks[0].args[2])
    added = None if of_own is None else _summed(kept, c)
    if of_own is None or of_index is None or added is None or of_own != (picks[0], of_index[1]):
        raise LeftAlone("the targets' log-probabilities are not added up over the ranks that have them")
    start, targets = _start(*of_index, val(x).shape[1])
    return ShardedLoss(c, x, log_probs, picks[0], added[1], targets, start, (sums[0], added[0]))


def _summed(node: fx.Node, c: Collective) -> tuple[fx.Node, fx.Node] | None:
    """The all-reduce that adds up a node over the ranks, and what waits for it."""
    pending = used_by(node, c10d.all_reduce.default)
    wait = used_by(pending, c10d.wait_tensor.default)
    return (pending, wait) if wait is not None and pending.args[1:] == ("sum", c.group) else None


def _zeroed(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(values, outside) of values that are 0 where they are outside."""
    if calls(node, aten.index_put.default) and len(node.args[1]) == 1 and len(node.args) == 3:
        values, (outside,), zero = node.args
    elif calls(node, aten.where.self):
        outside, zero, values = node.args
    else:
        return None
    return (values, outside) if number_of(zero) == 0 else None


def _start(shifted: Any, outside: Any, width: int) -> tuple[int, fx.Node]:
    """The first column, and the targets, of ``targets - start`` that are outside of ``width`` columns, or of fewer.
    LeftAlone: it is something else."""
    why = LeftAlone("its targets are not taken from this rank's first column on")
    if not calls(outside, aten.bitwise_or.Tensor, aten.logical_or.default):
        raise why
    below, past = outside.args
    if not calls(below, aten.lt.Scalar) or not calls(past, aten.ge.Scalar):
        raise why
    (targets, start), (same, end) = below.args, past.args
    if same is not targets or not isinstance(start, int):
        raise why
    if not known(start < end) or not known(end <= start + width):
        raise why
    # Inductor takes a difference to 0 out: one rank's graph has none.
    if calls(shifted, aten.sub.Tensor) and shifted.args[1] == start:
        shifted = shifted.args[0]
    elif start:
        raise why
    while calls(shifted, aten.clone.default) and shifted is not targets:
        shifted = shifted.args[0]
    if shifted is not targets:
        raise why
    return start, targets


def put_on_statistics(loss: ShardedLoss) -> fx.Node:
    """Puts one exchange of two numbers a row in place of three all-reduces, and gives its op. LeftAlone: the op does
    not take what it would get. The graph is as it was."""
    at, x = loss.picked, loss.x
    if any(u < at and u is not loss.own for u in loss.log_probs.users):
        raise LeftAlone("its log-softmax is used before the targets' log-probabilities are known")
    check_no_write(loss.c.node, at)
    with undone_if_left(), put_for(at):
        op, rows, picked = exchanged(at, loss.c, uncast(x), loss.targets, vocab_start=loss.start)
        # No rank has those of ignored rows, as -100: their sum is 0.
        none = call(at, aten.lt.Scalar, loss.targets, 0)
        picked = call(at, aten.where.ScalarSelf, none, 0.0, picked)
        log_probs = call(at, aten.sub.Tensor, x, rows[0])
    gone = made_of([loss.picked, loss.log_probs])
    loss.picked.replace_all_uses_with(picked)
    loss.log_probs.replace_all_uses_with(log_probs, delete_user_cb=lambda user: user not in gone)
    erase_unused(gone)
    return op
