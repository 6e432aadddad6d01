"""Several all-reduces whose results are added: one of the sum, before patterns are looked for.

So it is in the backward pass of projections that share an input, or of a mixture's experts and its shared expert; not
in float16, in which such a sum may be too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import reduce

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..agreement.signature import Order
from ..graph.collectives import Collective
from ..graph.effects import first_write
from ..graph.index_map import plain
from ..graph.nodes import LeftAlone, added_to, aten, c10d, calls, is_val, val
from ..graph.rewrite import call, erase_unused
from ..graph.sizes import alike
from ..graph.views import unchanged

#: What an all-reduce has in its ``meta`` that stands for others, too: these, which are no part of the graph any more.
MERGED = "weft_merged"


def merge_all_reduces(
    nodes: Iterable[fx.Node],
    groups: frozenset[str] | None,
    why_not: Callable[[str], str | None],
    orders: list[Order],
) -> None:
    """Makes one of several all-reduces whose results are added, wherever a graph has them, each with a note of the
    others. ``orders`` gets what these send, for the vote."""
    for node in nodes:
        if node._erased or not calls(node, c10d.all_reduce.default):
            continue
        with suppress(LeftAlone):
            c = Collective.from_node(node, groups)
            # What no vote can compare stays.
            if why_not(c.group) is not None or len(free_unbacked_symbols(val(c.x).numel())) > 1:
                continue
            c, others = merge_what_is_summed(c)
            if others:
                c.node.meta[MERGED] = others
                orders.append((plain(val(c.x).shape), tuple(val(c.x).shape)))


def merge_what_is_summed(c: Collective) -> tuple[Collective, tuple[fx.Node, ...]]:
    """The collective, which with others whose results are added to its own becomes that of what all of them reduce, and
    these, which are gone; changes the graph."""
    gone: list[fx.Node] = []
    while (found := _next_summed(c)) is not None:
        other, additions, terms = found
        c, last = sorted((c, other), key=lambda each: each.node)
        result = additions[-1]
        x, out = call(last.node, aten.add.Tensor, c.x, last.x), c.wait
        if terms:
            residual = reduce(lambda a, b: call(result, aten.add.Tensor, a, b), terms)
            out = call(result, aten.add.Tensor, residual, c.wait)
        last.node.prepend(c.node)
        last.wait.prepend(c.wait)
        c.node.update_arg(0, x)
        result.replace_all_uses_with(out)
        erase_unused([*additions, last.node, last.wait])
        # Either may stand for others already, found from one of these.
        gone += [last.node, *(n for each in (c, last) for n in each.node.meta.pop(MERGED, ()))]
        c = replace(c, x=x)
    return c, tuple(gone)


def _next_summed(c: Collective) -> tuple[Collective, list[fx.Node], list[fx.Node]] | None:
    """The next collective whose result is added to that of one; the additions up to it; what else they add."""
    additions: list[fx.Node] = []
    terms: list[fx.Node] = []
    node = c.wait
    while c.sums and len(node.users) == 1:
        (add,) = node.users
        if unchanged(add) is not None and alike(val(add), val(c.wait)):
            additions.append(add)
            node = add
            continue
        term = added_to(node, add)
        if not is_val(term) or not alike(val(term), val(c.wait)) or not alike(val(add), val(c.wait)):
            break
        wait = term
        while len(wait.users) == 1 and (source := unchanged(wait)) is not None:
            additions.append(wait)
            wait = source
        additions.append(add)
        node = add
        other = _other(c, wait)
        # What is reduced is read later than it was, what else is added later still.
        if other is not None and first_write(min(c.node, other.node), add) is None:
            return other, additions, terms
        terms.append(term)
    return None


def _other(c: Collective, wait: fx.Node) -> Collective | None:
    """The collective of the same kind that is waited for by ``wait``."""
    if not calls(wait, c10d.wait_tensor.default) or not calls(wait.args[0], c10d.all_reduce.default):
        return None
    try:
        other = Collective.from_node(wait.args[0])  # type: ignore[arg-type]
    except LeftAlone:
        return None
    same = (other.group, other.reduce_op) == (c.group, c.reduce_op) and alike(val(other.x), val(c.x))
    same = same and other.wait is wait and len(wait.users) == 1
    # What the ranks' sums leave of it may be in float16's range, and what each rank would sum first may not.
    same = same and val(c.x).dtype != torch.float16
    return other if same else None
