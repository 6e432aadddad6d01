"""Where the gradient of gathered columns goes: each rank's own part of it, or of the sum of all ranks'."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.nodes import FLAT, LeftAlone, argument, aten, c10d, calls, is_val, only_user, used_by, val, what
from ..graph.sizes import known, same_shape
from ..graph.split_cat import SPLITS, is_cut
from .columns import CAST, GatheredColumns, has_columns, keeps_columns


@dataclass(frozen=True)
class Path:
    """From a gradient of all columns to a part of it.

    Attributes:
        steps: each is a node of all columns: another shape or dtype, a multiple, zeros around it (``slice_scatter``),
            or a sum with other gradients (``add``).
        end: this rank's columns.
        summed: whether these are of the sum of all ranks' gradients.
    """

    steps: tuple[fx.Node, ...]
    end: fx.Node
    summed: bool

    @property
    def sums(self) -> list[fx.Node]:
        return [n for n in self.steps if calls(n, aten.add.Tensor)]


def path_of(gradient: fx.Node, columns: GatheredColumns) -> Path:
    """LeftAlone: all columns of the gradient are needed."""
    steps: list[fx.Node] = []
    node = gradient
    while True:
        if (end := _end(node, columns)) is not None:
            return Path(tuple(steps), *end)
        user = only_user(node)
        if user is None and any(map(_is_summed, node.users)):
            raise LeftAlone("its temperature is learned, and the gradient of that sums up all columns")
        if user is None or not (_is_multiple(user, node) or _is_put_into_zeros(user, node) or _is_sum(user)):
            raise LeftAlone(f"all columns of its gradient are used, by {' and '.join(map(what, node.users))}")
        steps.append(user)
        node = user


def _is_multiple(node: fx.Node, source: fx.Node) -> bool:
    """Whether the node has the source's columns, each multiplied by a number, or one of each row, column or both."""
    if keeps_columns(node) and calls(node, CAST, aten.slice.Tensor, *FLAT):
        return True
    divides = calls(node, aten.div.Tensor, aten.div.Scalar) and node.args[0] is source
    if not divides and not calls(node, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar):
        return False
    inputs = [a for a in node.args if has_columns(a)]
    return inputs.count(source) == 1 and all(same_shape(val(a).shape, val(node).shape) for a in inputs)


def _is_summed(node: Any) -> bool:
    while calls(node, CAST, aten.neg.default, aten.mul.Tensor):
        node = only_user(node)
    return calls(node, aten.sum.default, aten.sum.dim_IntList)


def _is_put_into_zeros(node: fx.Node, source: fx.Node) -> bool:
    if not calls(node, aten.slice_scatter.default) or node.args[1] is not source:
        return False
    zeros: Any = node.args[0]
    is_zero = calls(zeros, aten.full.default) and zeros.args[1] == 0
    return is_zero and argument(node, 2, "dim", 0) % val(node).dim() != val(node).dim() - 1


def _is_sum(node: fx.Node) -> bool:
    if not calls(node, aten.add.Tensor) or node.kwargs or not all(map(is_val, node.args)):
        return False
    return all(same_shape(val(a).shape, val(node).shape) for a in node.args)  # type: ignore[arg-type]


def _end(node: fx.Node, columns: GatheredColumns) -> tuple[fx.Node, bool] | None:
    """(this rank's part, whether it is of the sum of all ranks'), if nothing else is used."""
    cuts = list(node.users)
    splits = [u for u in cuts if calls(u, *SPLITS[:2])]
    if len(splits) == len(cuts) == 1:
        cuts = list(splits[0].users)
    if not cuts or not all(calls(u, operator.getitem, aten.slice.Tensor) for u in cuts):
        return None

    def is_of(cut: fx.Node, rank: int) -> bool:
        of_rank = is_cut(cut, node, val(node).dim() - 1, sum(columns.widths[:rank]))
        return of_rank and known(val(cut).shape[-1] == columns.widths[rank])

    if len(cuts) == 1 and is_of(cuts[0], columns.rank):
        return cuts[0], False
    joined = used_by(cuts[0], aten.cat.default)
    if joined is None or set(joined.all_input_nodes) != set(cuts):
        return None
    if argument(joined, 1, "dim", 0) % val(joined).dim() or len(joined.args[0]) != columns.c.world:
        return None
    if not all(is_of(cut, rank) for rank, cut in enumerate(joined.args[0])):
        return None
    scatter = used_by(joined, c10d.reduce_scatter_tensor.default)
    wait = used_by(scatter, c10d.wait_tensor.default)
    if wait is None or scatter.args[1:] != ("sum", columns.c.world, columns.c.group):
        return None
    return wait, True
