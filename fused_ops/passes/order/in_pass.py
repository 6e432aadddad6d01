"""What the pass asks of a new order: who may pass whom, and how it gets into the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx
from torch._inductor import config as inductor_config

from ..settings import PassSettings
from .change import OrderChange
from .copy_engines import place_gathers
from .costs import table_for
from .moves import OrderLimits, estimate, reorder
from .transports import runs_beside


def changed_order(
    graph: fx.Graph, settings: PassSettings, number: int, voted: Collection[str] | None
) -> OrderChange | None:
    """Moves what is not fused, as far as the settings say so; None where they ask for nothing.

    Args:
        number: the graph's.
        voted: the groups whose ranks can compare the order before each run: only collectives of these pass others.
            None for all, as ranks are known to run the same.
    """
    if settings.reorder is None:
        return None
    table = table_for(graph)
    change = reorder(graph, table, OrderLimits(settings.reorder, runs_beside(graph), voted), number)
    if place_gathers(graph):  # on the heap, not in torch's memory
        peak, drawn = estimate(graph, table)
        change = replace(change, peak_after=peak, drawn=(change.drawn[0], drawn))
    return change


def keep_what_is_ordered(graph: fx.Graph, change: OrderChange | None) -> None:
    """Has Inductor keep the order in which the graph is now. In lite mode it keeps that as it is, or is told to."""
    if change is None or not change.placed or inductor_config.fallback_by_default:
        return
    from .keep import keep_order  # Inductor's part of it

    keep_order(graph)
