"""What runs when in an order of a graph's nodes, by the table of costs, and how long is waited for collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..memory.live_bytes import LiveBytes
from .costs import CostTable
from .transports import Transfer

COMPUTE = "compute"  #: the lane of kernels


@dataclass(frozen=True)
class Timeline:
    """An order as it would run, in microseconds.

    Attributes:
        spans: (lane, name, begin, end) of kernels, in the lane "compute", and of collectives, in that of their
            transport.
        memory: (time, the most bytes that are held there), in the order of time.
        exposed: how long the stream waits for each collective, by name.
    """

    spans: tuple[tuple[str, str, float, float], ...]
    memory: tuple[tuple[float, int], ...]
    exposed: Mapping[str, float]

    @property
    def total(self) -> float:
        """How long the stream waits for all of them."""
        return sum(self.exposed.values())

    def beside(self, collective: str) -> tuple[tuple[str, float], ...]:
        """The kernels that run while a collective is on its way, and the microseconds of each in which both do."""
        first, last = next((b, e) for lane, n, b, e in self.spans if lane != COMPUTE and n == collective)
        both = {n: min(e, last) - max(b, first) for lane, n, b, e in self.spans if lane == COMPUTE}
        return tuple((name, us) for name, us in both.items() if us > 0)


def timeline_of(
    live: LiveBytes, found: Sequence[Transfer], times: Mapping[fx.Node, float], table: CostTable
) -> Timeline:
    """What runs when: kernels follow each other on one stream, collectives of a transport on another.

    A kernel beside a collective takes longer. One of a late transport begins when the kernel after its start ends.
    ``times``: microseconds of the kernels.
    """
    starts = {t.start: t for t in found}
    ends: dict[fx.Node, float] = {}
    free: dict[str, float] = {}
    waited = {wait: t.start for t in found for wait in t.waits}
    exposed = {t.start.name: 0.0 for t in found}
    spans: list[tuple[str, str, float, float]] = []
    most: dict[float, int] = {}
    queued: list[Transfer] = []
    now = busy = 0.0

    def begin_queued() -> float:
        for each in queued:
            begin = max(now, free.get(each.transport, 0.0))
            ends[each.start] = free[each.transport] = begin + each.time
            spans.append((each.transport, each.start.name, begin, ends[each.start]))
        last = max([busy, *(ends[each.start] for each in queued)])
        queued.clear()
        return last

    for node, size in zip(live.order, live.live, strict=True):
        most[now] = max(size, most.get(now, 0))
        if node in starts:
            queued.append(starts[node])
            if starts[node].transport not in table.late:
                busy = begin_queued()
        elif node in waited:
            busy = begin_queued()
            late = max(0.0, ends[waited[node]] - now)
            exposed[waited[node].name] += late
            now += late
        elif time := times[node]:
            beside = min(time * table.contention, max(0.0, busy - now))
            begin, now = now, now + beside + (time - beside / table.contention)
            spans.append((COMPUTE, node.name, begin, now))
            busy = begin_queued()
    begin_queued()
    return Timeline(tuple(spans), tuple(most.items()), exposed)
