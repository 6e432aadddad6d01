"""An all-gather, a reduce-scatter, or an all-to-all of even parts that no product is beside: ``one_shot_...`` alone.

torch gathers along dimension 0 only, then cuts and joins for another one; it joins what it has cut before it scatters.
The ops do that as they store and load, so both go.

A product whose columns are gathered along the last dimension, and that nothing else takes, is a part of the op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ... import validation
from ...library import schema
from ..graph.collectives import Collective
from ..graph.effects import check_no_write
from ..graph.index_map import gathered_dims, same_dims
from ..graph.nodes import FLAT, LeftAlone, aten, c10d, calls, only_user, some, val, what
from ..graph.rewrite import fused, put_in_place, reshape, undone_if_left
from ..graph.sizes import is_contiguous, known
from ..graph.split_cat import cut_of
from ..graph.views import CASTS, ViewStep, has_same_columns, steps_back, views
from .matmuls import product
from .pattern import Pattern, word_of
from .sum_of_matmuls import has_product


def match_alone(c: Collective, why: str = "", *, decided: bool = False) -> Pattern:
    """``why``: no product takes it; ``decided``: its size is not weighed. LeftAlone: it is a number, or waited for
    later: then the group's own backend runs it beside the rest."""
    if val(c.x).dim() == 0:
        raise LeftAlone("its input is a number")
    if (between := c.beside) is not None:
        raise LeftAlone(
            f"it is waited for after {what(between)}, which the group's own backend overlaps with it"
        )
    gathers = c.node.target is c10d.all_gather_into_tensor.default
    found = _FOUND[c.node.target](c)  # type: ignore[index]
    dim, x = found.dims[0], val(found.x)
    whole = val(found.result).shape if gathers else x.shape
    return Pattern.of_tensor(
        c,
        x,
        op=found.op,
        form=f"{word_of(found.op)} alone" + f" of dimension {dim}" * bool(dim),
        detail=f"with no product: {why}" if why else "",
        sizes=(math.prod(whole[:-1]), whole[-1], 0),
        replace=found.replace,
        dim=dim,
        last_dim=dim == x.dim() - 1,
        decided=decided,
    )


def match_matmul_all_gather(c: Collective) -> Pattern | None:
    """``fused_matmul_all_gather``; None where no product is gathered. LeftAlone: one is, and not as the op does it."""
    path = [c.x]
    while calls(path[-1], *FLAT) and has_same_columns(path[-1]):
        path.append(path[-1].args[0])  # type: ignore[arg-type]
    taken, last = product(path[-1]), val(c.x).dim() - 1
    if taken is None or taken.node.target is not aten.mm.default:
        if has_product(c.x):
            raise LeftAlone(f"{what(path[-1])} is no product alone")
        return None
    found = _gathered(c)
    if last < 1 or found.dims != (last,):
        raise LeftAlone("columns are not gathered side by side")
    if _is_cut_from_padding(found.result, c.world):
        raise LeftAlone("columns are cut off that some ranks may have padded")
    if (node := next((n for n in path if only_user(n) is None), None)) is not None:
        raise LeftAlone(f"{what(node)} is used by {some(node.users)}")
    if val(c.x).dtype not in validation.DTYPES or not is_contiguous(val(c.x)):
        raise LeftAlone("the op takes no such dtype or layout")
    check_no_write(taken.node, c.node)
    (m, k), n = val(taken.left).shape, val(taken.right).shape[1]

    def replace() -> None:
        with undone_if_left():
            out = fused(c.node, schema.matmul_all_gather, c, taken.left, taken.right)
            out = reshape(out, [*val(found.result).shape], c.node, [taken.left, c.x])
        found.put(out, path)

    return Pattern.of_tensor(
        c,
        val(c.x),
        op=schema.matmul_all_gather,
        form="product → all_gather of columns",
        detail="",
        sizes=(m, n, k),
        replace=replace,
        dim=last,
        last_dim=True,
    )


def _is_cut_from_padding(gathered: fx.Node, world: int) -> bool:
    """Whether columns are cut off that ranks with fewer ones have padded. There padding stands between the product and
    the gather; all ranks must choose alike."""
    for node in gathered.users:
        if calls(node, *FLAT, *CASTS) and has_same_columns(node) and _is_cut_from_padding(node, world):
            return True
        cut = cut_of(node)
        if cut is not None and cut.dim == val(gathered).dim() - 1 and known(cut.start == 0):
            missing = val(gathered).shape[-1] - cut.stop
            if known(missing > 0) and known(missing < world):
                return True
    return False


@dataclass
class _Replacement:
    """The op along dimensions from ``x`` to ``result``; ``steps`` lie between these and the collective."""

    collective: Collective
    op: Any
    dims: tuple[int, ...]
    x: fx.Node
    result: fx.Node
    steps: tuple[ViewStep, ...] = ()

    def replace(self) -> None:
        c, at = self.collective, self.collective.node
        reduce_op = [c.reduce_op] if c.reduce_op else []
        with undone_if_left():
            out = fused(at, self.op, c, self.x, *reduce_op, *self.dims)
        self.put(out, ())

    def put(self, out: fx.Node, before: Sequence[fx.Node]) -> None:
        """In place of the result, and of what stood ``before`` the collective for it alone."""
        nodes = [n for step in self.steps for n in step.nodes]
        put_in_place({self.result: out}, [*nodes, self.collective.wait, self.collective.node, *before])


def _gathered(c: Collective) -> _Replacement:
    shape = val(c.x).shape
    found, _ = views(c.wait, gathered_dims(shape, c.world))
    for node, view in found.items():
        steps = list(view.steps(found))
        if not steps or view.changes or not is_contiguous(val(node)):
            continue
        # What lies between is used on the way there only.
        nodes = {n for step in steps for n in step.nodes}
        if any(user not in nodes for n in (c.wait, *(nodes - {node})) for user in n.users):
            continue
        for dim in range(1, len(shape)):
            if same_dims(view.dims, gathered_dims(shape, c.world, dim)):
                return _Replacement(c, schema.all_gather, (dim,), c.x, node, tuple(steps))
    return _Replacement(c, schema.all_gather, (0,), c.x, c.wait)


def _scattered(c: Collective) -> _Replacement:
    part = val(c.wait).shape
    step = next(steps_back(c.x), None) if calls(c.x, aten.cat.default) else None
    if step is not None:
        dims = step.backward(gathered_dims(part, c.world))
        for dim in range(1, len(part)):
            if same_dims(dims, gathered_dims(part, c.world, dim)):
                return _Replacement(c, schema.reduce_scatter, (dim,), step.source, c.wait, (step,))
    return _Replacement(c, schema.reduce_scatter, (0,), c.x, c.wait)


_FOUND = {
    c10d.all_gather_into_tensor.default: _gathered,
    c10d.reduce_scatter_tensor.default: _scattered,
    c10d.all_to_all_single.default: lambda c: _Replacement(c, schema.all_to_all, (0, 0), c.x, c.wait),
}
