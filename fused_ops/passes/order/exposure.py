"""How long the compute stream would wait for collectives, in an order of a graph's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from .transports import Transfer


def exposed_times(
    order: Sequence[fx.Node], found: Sequence[Transfer], times: Mapping[fx.Node, float], contention: float
) -> dict[fx.Node, float]:
    """Microseconds that the stream waits for each collective.

    Kernels follow each other on one stream, collectives of a transport on another. A kernel beside a collective takes
    ``contention`` times as long.

    Args:
        times: of the kernels.
    """
    starts = {t.start: t for t in found}
    ends: dict[fx.Node, float] = {}
    free: dict[str, float] = {}
    waited = {wait: t.start for t in found for wait in t.waits}
    exposed = {t.start: 0.0 for t in found}
    now = busy = 0.0
    for node in order:
        if node in starts:
            transfer = starts[node]
            ends[node] = free[transfer.transport] = (
                max(now, free.get(transfer.transport, 0.0)) + transfer.time
            )
            busy = max(busy, ends[node])
        elif node in waited:
            late = max(0.0, ends[waited[node]] - now)
            exposed[waited[node]] += late
            now += late
        elif time := times[node]:
            beside = min(time * contention, max(0.0, busy - now))
            now += beside + (time - beside / contention)
    return exposed
