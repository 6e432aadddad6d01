"""What the pass asks of a new order: who may pass whom, and how it gets into the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx
from torch._inductor import config as inductor_config

from ..settings import PassSettings
from .buckets import fill_buckets
from .change import Bucket, OrderChange
from .costs import table_for
from .moves import OrderLimits, reorder, waits_and_peak
from .transports import runs_beside


def changed_order(
    graph: fx.Graph, settings: PassSettings, number: int, voted: Collection[str] | None
) -> OrderChange | None:
    """Puts what is not fused into buckets, and moves it, as far as the settings say so.

    Args:
        number: the graph's.
        voted: the groups whose ranks can compare the order before each run: only collectives of these go into buckets,
            and pass others. None for all, as ranks are known to run the same.

    Returns:
        what was done; None where the settings ask for nothing.
    """
    if settings.reorder is None and not settings.buckets:
        return None
    table, memory = table_for(graph), settings.reorder or 0.0
    given: tuple[float, int] | None = None
    buckets: tuple[Bucket, ...] = ()
    crossed: frozenset[str] = frozenset()
    if settings.buckets and not inductor_config.cpp_wrapper:  # whose code calls no op that returns a list
        given = waits_and_peak(graph, table)
        buckets, crossed = fill_buckets(graph, settings.buckets, memory, voted)
    if settings.reorder is None:
        assert given is not None or not buckets
        before = given or waits_and_peak(graph, table)
        after = waits_and_peak(graph, table) if buckets else before
        kept = "" if buckets else "no collectives go into one bucket"
        peaks = before[1], after[1]
        return OrderChange(
            number, (), before[0], after[0], *peaks, kept, crossed, buckets, measured=table.measured
        )
    limits = OrderLimits(
        in_flight=settings.gathers + 1,
        gathers=settings.gathers,
        memory=memory,
        most=None if given is None else int(given[1] * (1 + memory)),
        beside=runs_beside(graph),
        voted=voted,
    )
    change = replace(reorder(graph, table, limits, number), measured=table.measured)
    if not buckets or given is None:
        return change
    if change.kept:
        now, peak = waits_and_peak(graph, table)
        change = replace(change, after=now, peak_after=peak, kept="")
    return replace(
        change, before=given[0], peak_before=given[1], crossed=change.crossed | crossed, buckets=buckets
    )


def keep_what_is_ordered(graph: fx.Graph, change: OrderChange | None) -> None:
    """Has Inductor keep the order in which the graph is now. In lite mode it keeps that as it is, or is told to."""
    if change is None or not (change.placed or change.buckets) or inductor_config.fallback_by_default:
        return
    from .keep import keep_order  # Inductor's part of it

    keep_order(graph)
