"""Sequence parallelism as a rewrite: an all-reduce, what follows it row by row, and what needs all rows again.

The all-reduce becomes a reduce-scatter, what follows is computed of a rank's own rows, and these are gathered where all
of them are needed: before a product mostly, which the pass then fuses, as it does the product before the all-reduce.
Residuals stay on a rank's own rows from layer to layer.

A sum is rounded where it was, to the dtype that it had, and so is what is computed of it. Only a sum of all rows, as in
the gradient of a norm's weight, is taken in another order. ``same.py`` has what is taken to be the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from torch import fx

from ....symm_mem import resolve_group
from ..graph.collectives import Collective
from ..graph.nodes import LeftAlone, c10d, calls, tangents, val
from ..graph.row_wise import RowLayout
from ..graph.sizes import Size, known, same_shape
from ..patterns.sum_of_matmuls import has_product
from ..patterns.summed_all_reduces import merge_what_is_summed
from ..records.entry import NOTE
from ..settings import AUTO, PassSettings
from .estimate import why_more_bytes, why_not_faster
from .region import Region, regions
from .replace import put_on_rows
from .same import same_on_all_ranks

BY_ROWS = "of an all-reduce, sequence parallel"


def put_joint_graph_on_rows(graph: fx.Graph, settings: PassSettings) -> None:
    """Of a training step: what is kept for the backward is on a rank's own rows, too. What an all-reduce becomes does
    not depend on the rank: a slice is none of "each rank's own rows" here."""
    if not tangents(graph):
        return
    put_sequences_on_rows(graph, settings)
    for target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.meta.setdefault(NOTE, "")  # it was looked at


def put_graph_on_rows(graph: fx.Graph, settings: PassSettings, why_not: Callable[[str], str | None]) -> None:
    """Does the same to a graph that Inductor's last passes get, unless the joint graph had it. ``why_not``: why nothing
    of a group should be changed."""
    # What a forward graph has kept for a backward one, the ranks need not have alike.
    if settings.sequence_parallel and not tangents(graph):
        put_sequences_on_rows(graph, settings, why_not, own_chunks=bool(settings.agree))


def put_sequences_on_rows(
    graph: fx.Graph,
    settings: PassSettings,
    why_not: Callable[[str], str | None] = lambda group: None,
    *,
    own_chunks: bool = False,
) -> None:
    """Changes the graph, and notes what became of each all-reduce.

    Args:
        settings: ``sequence_parallel``: True for what sends no more, or "auto" for what should be faster by the
            estimate, too.
        why_not: why all-reduces of a group should stay, whatever follows them.
        own_chunks: whether ranks compare what the graph has become before they run it, see ``RowLayout``.
    """
    found: dict[str, list[Collective]] = {}
    as_one: dict[fx.Node, list[str]] = {}  # what is said of those that stand for several
    for node in [n for n in graph.nodes if calls(n, c10d.all_reduce.default) and NOTE not in n.meta]:
        if node._erased:
            continue
        with suppress(LeftAlone):
            c = Collective.from_node(node, settings.groups)
            if (reason := _why_no_rows(c) or why_not(c.group)) is not None:
                c.node.meta[NOTE] = f"not sequence parallel: {reason}"
                continue
            if has_product(c.x):
                c, merged = merge_what_is_summed(c)
                if merged:
                    as_one[c.node] = [f"{1 + len(merged)} all-reduces as one"]
            found.setdefault(c.group, []).append(c)
    for group, several in found.items():
        same = same_on_all_ranks(graph, group)
        for region in _best(graph, several, same, own_chunks):
            try:
                reason = region.why_not() or why_more_bytes(region)
                if reason is None and settings.sequence_parallel == AUTO:
                    reason = why_not_faster(region)
                if reason is not None:
                    raise LeftAlone(reason)
                for scattered, c in put_on_rows(region).items():
                    scattered.meta[NOTE] = ", ".join([BY_ROWS, *as_one.get(c.node, ())])
            except LeftAlone as e:
                for c in region.collectives:
                    c.node.meta[NOTE] = ", ".join([*as_one.get(c.node, ()), f"not sequence parallel: {e}"])


def _best(graph: fx.Graph, several: list[Collective], same: set[fx.Node], own_chunks: bool) -> list[Region]:
    """The regions of these all-reduces, with rows cut where the graph cuts them, if it does."""
    flat: list[tuple[Collective, RowLayout]] = []
    for c in several:
        layout = _layout(c, (math.prod(val(c.x).shape[:-1]),), 0, own_chunks)
        flat.append((c, next((each for _, each in flat if known(each.lead[0] == layout.lead[0])), layout)))
    best = regions(graph, flat, same)
    lead = val(several[0].x).shape[:-1]
    if all(same_shape(val(c.x).shape[:-1], lead) for c in several):
        for dim in range(1, len(lead)):
            if known(lead[dim] % several[0].world == 0):
                layout = _layout(several[0], tuple(lead), dim, own_chunks)
                found = regions(graph, [(c, layout) for c in several], same)
                if _chunks(found) > _chunks(best):
                    best = found
    return best


def _chunks(found: list[Region]) -> int:
    return sum(len(region.chunks) for region in found)


def _layout(c: Collective, lead: tuple[Size, ...], dim: int, own_chunks: bool) -> RowLayout:
    return RowLayout(lead, dim, c.group, c.world, resolve_group(c.group).rank(), own_chunks)


def _why_no_rows(c: Collective) -> str | None:
    x = val(c.x)
    if not c.sums:
        return f"it reduces by {c.reduce_op!r}"
    if x.dim() < 2:
        return "it has no rows"
    rows = math.prod(x.shape[:-1])
    if not known(rows % c.world == 0) or known(rows == 0):
        how = "are no" if isinstance(rows, int) else "are not known to be a"
        return f"its {rows} rows {how} multiple of {c.world} ranks"
    return None
