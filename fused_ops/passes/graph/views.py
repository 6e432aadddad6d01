"""Nodes that hold the elements of another one, in any order or dtype, or a multiple of each, and their dimensions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .index_map import Dims, moved_dims, permuted, reshaped
from .nodes import FLAT, LeftAlone, argument, aten, calls, is_val, val, what
from .scaling import Change, scaling
from .sizes import Size, known, same_shape
from .split_cat import SLICES, SPLITS, cut_of

CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)
_WHOLE = (aten.slice.Tensor, aten.expand.default)
#: The number that leaves an operand as it is, and whether it may stand on the left, too.
NEUTRAL = {
    getattr(getattr(aten, op), kind): (number, commutes and kind == "Tensor")
    for op, number, commutes in (("add", 0, True), ("sub", 0, False), ("mul", 1, True), ("div", 1, False))
    for kind in ("Tensor", "Scalar")
}


@dataclass(frozen=True)
class ViewStep:
    """``node`` has the elements of ``source``, cast or multiplied by ``change`` if that is not None.

    ``forward`` gives the dimensions of the node from those of the source, ``backward`` the other way. ``between`` are
    the parts of the source that the node joins.
    """

    node: fx.Node
    source: fx.Node
    forward: Callable[[Dims], Dims]
    backward: Callable[[Dims], Dims]
    between: tuple[fx.Node, ...] = ()
    change: Change | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (*self.between, self.node)


def view_step(node: fx.Node) -> ViewStep | None:
    """The step to this node from what it is made of; None if it holds other elements than that, or than multiples.
    LeftAlone: it joins parts, but not all of one tensor in order."""
    if not is_val(node) or node.op != "call_function" or not node.args:
        return None
    if calls(node, aten.cat.default):
        return _joined_parts(node)
    if (same := unchanged(node)) is not None:
        return ViewStep(node, same, _as_it_is, _as_it_is)
    if (multiple := scaling(node)) is not None:
        return ViewStep(node, multiple[0], _as_it_is, _as_it_is, change=multiple[1])
    source = node.args[0]
    if not is_val(source):
        return None
    have, want = val(source).shape, val(node).shape
    if node.target in FLAT or (node.target in _WHOLE and _same_but_ones(have, want)):
        return ViewStep(node, source, lambda dims: reshaped(dims, want), lambda dims: reshaped(dims, have))
    if calls(node, *PERMUTES):
        permutation = _permutation(node, len(have))
        inverse = [permutation.index(i) for i in range(len(have))]
        return ViewStep(node, source, lambda d: permuted(d, permutation), lambda d: permuted(d, inverse))
    if calls(node, *CASTS) and val(node).device == val(source).device:
        change = None if val(node).dtype == val(source).dtype else val(node).dtype
        return ViewStep(node, source, _as_it_is, _as_it_is, change=change)
    return None


def _as_it_is(dims: Dims) -> Dims:
    return dims


def _joined_parts(cat: fx.Node) -> ViewStep:
    """How a gather or scatter along a dimension other than 0 is spelled: a tensor cut into parts, joined along another.
    LeftAlone: what is joined is not exactly the parts of one tensor, once each and in order."""
    parts: Any = cat.args[0]
    if not isinstance(parts, list | tuple) or not all(map(is_val, parts)):
        raise LeftAlone(f"the inputs of {what(cat)} are not known")
    first, nodes = cut_of(parts[0]), dict[fx.Node, None]()
    end: Size = 0
    for part in parts:
        taken = cut_of(part)
        if taken is None or first is None or (taken.source, taken.dropped) != (first.source, first.dropped):
            of = "a tensor" if first is None else what(first.source)
            raise LeftAlone(f"{what(cat)} joins {what(part)}, which is no part of {of}")
        if taken.dim != first.dim:
            raise LeftAlone(f"{what(cat)} joins parts cut along different dimensions")
        if not known(taken.start == end):
            raise LeftAlone(
                f"{what(part)} starts at {taken.start}, where {end} is next: parts overlap, miss or swap"
            )
        end = taken.stop
        nodes |= dict.fromkeys([part] if part.args[0] is taken.source else [part.args[0], part])
    assert first is not None
    source, cut, dropped, count = first.source, first.dim, first.dropped, len(parts)
    if not known(end == (whole := val(source).shape[cut])):
        raise LeftAlone(f"the parts that {what(cat)} joins end at {end}, {what(source)} at {whole}")
    # Parts can be joined only if their sizes are the same in every other dimension. So they are equal where they are
    # joined along another dimension than they were cut along, or have not that one any more.
    join = argument(cat, 1, "dim", 0) % val(cat).dim()

    def forward(dims: Dims) -> Dims:
        if not dropped:
            return moved_dims(dims, count, cut, join)
        dims = moved_dims(dims, count, cut, join + (join >= cut))
        return (*dims[:cut], *dims[cut + 1 :])

    def backward(dims: Dims) -> Dims:
        if not dropped:
            return moved_dims(dims, count, join, cut)
        return moved_dims((*dims[:cut], (), *dims[cut:]), count, join + (join >= cut), cut)

    return ViewStep(cat, source, forward, backward, tuple(nodes))


def steps_back(node: fx.Node) -> Iterator[ViewStep]:
    """The steps to a node from what it is made of, the last one first, as far as there are any."""
    with suppress(LeftAlone):
        while (step := view_step(node)) is not None:
            yield step
            node = step.source


def unchanged(node: fx.Node) -> fx.Node | None:
    """The tensor to which the node adds the number 0, or which it multiplies by 1, and which it therefore equals.

    Python's ``sum`` begins with such a 0. Adding it makes +0 of -0; a sum that is rounded later or taken in another
    order may do so, too, and Inductor drops tensors of zeros alike.
    """
    if not calls(node, *NEUTRAL) or not is_val(node) or len(node.args) != 2:
        return None
    neutral, either = NEUTRAL[node.target]  # type: ignore[index]
    source, number = node.args
    if either and not is_val(source):
        source, number = number, source
    if not is_val(source) or not isinstance(number, int | float) or number != neutral:
        return None
    scaled = node.kwargs.get("alpha", 1) != 1  # by an infinite one 0 is NaN
    return None if scaled or val(source).dtype != val(node).dtype else source


def has_same_columns(view: fx.Node) -> bool:
    """Whether the last dimension is that of what the node is a view of."""
    source = view.args[0]
    return is_val(source) and same_shape(val(source).shape[-1:], val(view).shape[-1:])


def _same_but_ones(have: torch.Size, want: torch.Size) -> bool:
    """A slice of everything, or an expansion that adds dimensions of size 1."""
    extra = len(want) - len(have)
    return extra >= 0 and same_shape((*[1] * extra, *have), want)


def _permutation(node: fx.Node, ndim: int) -> list[int]:
    if calls(node, aten.permute.default):
        return [int(p) % ndim for p in node.args[1]]  # type: ignore[arg-type, union-attr]
    order = list(range(ndim))
    if ndim > 1:
        a, b = (0, 1) if calls(node, aten.t.default) else (int(p) % ndim for p in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return order


@dataclass(frozen=True)
class View:
    """A node with all elements of the gathered tensor: where they lie, and what they were cast to or multiplied by."""

    node: fx.Node
    dims: Dims
    changes: tuple[Change, ...]
    step: ViewStep | None  # None for the gathered tensor itself

    def steps(self, found: Mapping[fx.Node, View]) -> Iterator[ViewStep]:
        """The steps to it from the gathered tensor, the last one first; ``found`` as ``views`` gives it."""
        view = self
        while view.step is not None:
            yield view.step
            view = found[view.step.source]


def views(root: fx.Node, dims: Dims) -> tuple[dict[fx.Node, View], list[str]]:
    """The node and all that is made of it by steps, in the order found; and why others that join its parts are none."""
    found = {root: View(root, dims, (), None)}
    reasons: dict[fx.Node, str] = {}
    pending = [root]
    while pending:
        view = found[pending.pop()]
        for node in _next(view.node):
            if node in found:
                continue
            try:
                taken = view_step(node)
                if taken is None or taken.source is not view.node:
                    continue
                changes = view.changes if taken.change is None else (*view.changes, taken.change)
                found[node] = View(node, taken.forward(view.dims), changes, taken)
            except LeftAlone as e:
                reasons[node] = str(e)
                continue
            pending.append(node)
    return found, list(dict.fromkeys(reasons.values()))


def _next(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node, and the cats of what they cut from it."""
    for user in list(node.users):
        yield user
        if calls(user, *SPLITS):
            parts = [p for p in user.users if calls(p, operator.getitem)]
        elif calls(user, *SLICES):
            parts = [user]
        else:
            continue
        yield from dict.fromkeys(n for part in parts for n in part.users if calls(n, aten.cat.default))
