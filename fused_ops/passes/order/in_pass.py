"""What the pass asks of a new order: who may pass whom, and how it gets into the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx
from torch._inductor import config as inductor_config

from ..settings import PassSettings
from .buckets import fill_buckets
from .change import Bucket, OrderChange
from .copy_engines import place_gathers
from .costs import table_for
from .moves import OrderEstimate, OrderLimits, reorder
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
    given: OrderEstimate | None = None
    buckets: tuple[Bucket, ...] = ()
    crossed: frozenset[str] = frozenset()
    if settings.buckets and not inductor_config.cpp_wrapper:  # whose code calls no op that returns a list
        given = OrderEstimate.of(graph, table)
        buckets, crossed = fill_buckets(graph, settings.buckets, memory, voted)
    if settings.reorder is None:
        change = OrderChange(number, (), 0.0, 0.0, 0, 0, "no collectives go into one bucket")
    else:
        limits = OrderLimits(
            in_flight=settings.gathers + 1,
            gathers=settings.gathers,
            memory=memory,
            most=None if given is None else int(given.peak * (1 + memory)),
            beside=runs_beside(graph),
            voted=voted,
        )
        change = reorder(graph, table, limits, number)
    change = replace(change, measured=table.measured)
    if buckets or settings.reorder is None:
        now = OrderEstimate.of(graph, table)
        before = given or now
        change = replace(
            change,
            before=before.exposed,
            after=now.exposed,
            peak_before=before.peak,
            peak_after=now.peak,
            kept="" if buckets else change.kept,
            crossed=change.crossed | crossed,
            buckets=buckets,
            drawn=(before.drawn, now.drawn),
        )
    if place_gathers(graph):  # on the heap, not in torch's memory
        now = OrderEstimate.of(graph, table)
        change = replace(change, peak_after=now.peak, drawn=(change.drawn[0], now.drawn))
    return change


def keep_what_is_ordered(graph: fx.Graph, change: OrderChange | None) -> None:
    """Has Inductor keep the order in which the graph is now. In lite mode it keeps that as it is, or is told to."""
    if change is None or not (change.placed or change.buckets) or inductor_config.fallback_by_default:
        return
    from .keep import keep_order  # Inductor's part of it

    keep_order(graph)
