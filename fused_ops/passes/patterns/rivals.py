"""A product between a gather and a reduction: one op takes it, and it is that which should save more.

A reduction takes its products as a whole. A gather can go without some of its own: what it loses is what the estimate
falls by. A gathered weight, on the right, is no rival: it can be there early, whatever becomes of its product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import fx

from ...dispatch.profitability import FusionCandidate, expected_gain
from ..graph.collectives import kind_of
from ..graph.nodes import LeftAlone, Size, aten, c10d, calls, hint_or_one, val
from ..graph.split_cat import SPLITS
from ..graph.views import steps_back
from .matmuls import product
from .pattern import Pattern

_FAR = 64  # steps from a reduction to its products, and from these to what is gathered


class Yielding(NamedTuple):
    """A reduction's products should be fused with these gathers."""

    gathers: frozenset[fx.Node]
    why: str


def yielding(nodes: Iterable[fx.Node], find: Callable[[fx.Node], Pattern]) -> dict[fx.Node, Yielding]:
    """The reductions whose products the gathers before them should have.

    Args:
        nodes: the collectives of a graph.
        find: the pattern of a collective.
    """
    found: dict[fx.Node, Yielding] = {}
    matches: dict[fx.Node, Pattern] = {}
    for node in nodes:
        gathers = _gathers_before(node) if "gather" not in kind_of(node) else set()
        if not gathers:
            continue
        try:
            match = find(node)
            if match.sum is None:
                continue
            for gather in gathers - matches.keys():
                matches[gather] = find(gather)
        except LeftAlone:
            continue
        if not all(matches[gather].uses for gather in gathers):
            continue  # scaled products
        own = {p.node for p in match.sum.products}
        own_gain = _gain("matmul_reduce_scatter", match, *match.sizes)
        lost = sum(_loss(matches[gather], own) for gather in gathers)
        if lost > own_gain:
            found[node] = Yielding(
                frozenset(gathers),
                f"its product is fused with the gather before it, which saves {lost:.3g} us by the estimate, "
                f"this one {own_gain:.3g} us",
            )
    return found


def _loss(match: Pattern, taken: set[fx.Node]) -> float:
    """Microseconds that a gather saves less without these products."""
    left = [u for u in match.uses if u.product.node not in taken]
    if len(left) == len(match.uses) or any(u.transposed for u in match.uses):
        return 0.0
    m, n, k = match.sizes
    rest = sum(u.width for u in left)
    whole = _gain("all_gather_matmul", match, m, n, k)
    return whole - (_gain("all_gather_matmul", match, m, rest, k) if left else 0.0)


def _gain(op: str, match: Pattern, *sizes: Size) -> float:
    m, n, k = map(hint_or_one, sizes)
    c = match.collective
    return expected_gain(FusionCandidate(op, m, n, k, c.world, match.dtype, val(c.x).device.type))


def _gathers_before(node: fx.Node) -> set[fx.Node]:
    """Those of which a product that the collective reduces has its left operand."""
    found = set()
    for each in _back(node.args[0], _summed):
        if (taken := product(each)) is not None:
            for source in _back(taken.left, lambda n: ()):
                if calls(source, c10d.wait_tensor.default):
                    gather = source.args[0]
                    if calls(gather, c10d.all_gather_into_tensor.default):
                        found.add(gather)
    return found  # type: ignore[return-value]


def _summed(node: fx.Node) -> tuple[object, ...]:
    return node.args[:2] if calls(node, aten.add.Tensor, aten.sub.Tensor) else ()


def _back(start: object, more: Callable[[fx.Node], tuple[object, ...]]) -> list[fx.Node]:
    """A node and what it is made of by views, casts, factors, cuts and joins; and whatever ``more`` gives."""
    pending, seen = [start], dict[fx.Node, None]()
    while pending and len(seen) < _FAR:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen[node] = None
        pending += more(node)
        if calls(node, operator.getitem, *SPLITS):
            pending.append(node.args[0])
        elif (step := next(steps_back(node), None)) is not None:
            pending.append(step.source)
    return list(seen)
