"""What the pass asks of a new order: who may pass whom, and how it gets into the graph."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch._inductor import config as inductor_config

from ..memory.at_run_time import verifies
from .change import OrderChange
from .costs import table_for
from .moves import OrderLimits, reorder
from .placed import place_gathers
from .transports import runs_beside


def reordered(graph: fx.Graph, memory: float, number: int, voted: Collection[str] | None) -> OrderChange:
    """Moves what is not fused.

    Args:
        memory: how much the peak may grow, as a part of it.
        number: the graph's.
        voted: the groups whose ranks can compare the order before each run: a collective may pass one of another
            transport only if both are of these. None for all, as ranks are known to run the same.
    """
    limits = OrderLimits(memory=memory, beside=runs_beside(graph), voted=voted)
    change = reorder(graph, table_for(graph), limits, number)
    if not verifies():  # whose interpreter compares the storages of values with those of their fakes
        place_gathers(graph)
    return change


def keep_what_is_ordered(graph: fx.Graph, change: OrderChange | None) -> None:
    """Has Inductor keep the order in which the graph is now. In lite mode it keeps that as it is, or is told to."""
    if change is None or not change.placed or inductor_config.fallback_by_default:
        return
    from .keep import keep_order  # Inductor's part of it

    keep_order(graph)
