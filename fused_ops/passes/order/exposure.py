"""What runs when in an order of a graph's nodes, by the table of costs, and how long is waited for collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from .costs import CostTable
from .transports import Transfer

COMPUTE = "compute"  #: the lane of kernels


@dataclass
class Timeline:
    """An order as it would run.

    Attributes:
        exposed: microseconds that the stream waits for each collective.
        spans: (lane, name, begin, end) of kernels, in the lane "compute", and of collectives, in that of their
            transport.
        at: the time at which each node of the order is reached.
    """

    exposed: dict[fx.Node, float] = field(default_factory=dict)
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def memory(self, live: Sequence[int]) -> list[tuple[float, int]]:
        """The most bytes that are held at each time at which something begins."""
        most: dict[float, int] = {}
        for when, size in zip(self.at, live, strict=True):
            most[when] = max(size, most.get(when, 0))
        return sorted(most.items())

    def beside(self, collective: str) -> tuple[tuple[str, float], ...]:
        """The kernels that run while a collective is on its way, and the microseconds of each in which both do."""
        first, last = next(
            (b, e) for lane, name, b, e in self.spans if lane != COMPUTE and name == collective
        )
        both = {n: min(e, last) - max(b, first) for lane, n, b, e in self.spans if lane == COMPUTE}
        return tuple((name, us) for name, us in both.items() if us > 0)


def timeline_of(
    order: Sequence[fx.Node], found: Sequence[Transfer], times: Mapping[fx.Node, float], table: CostTable
) -> Timeline:
    """What runs when: kernels follow each other on one stream, collectives of a transport on another.

    A kernel beside a collective takes longer. One of a late transport begins when the kernel after its start ends.
    ``times``: microseconds of the kernels.
    """
    starts = {t.start: t for t in found}
    ends: dict[fx.Node, float] = {}
    free: dict[str, float] = {}
    waited = {wait: t.start for t in found for wait in t.waits}
    line = Timeline({t.start: 0.0 for t in found})
    queued: list[Transfer] = []
    now = busy = 0.0

    def begin_queued() -> float:
        for each in queued:
            begin = max(now, free.get(each.transport, 0.0))
            ends[each.start] = free[each.transport] = begin + each.time
            line.spans.append((each.transport, each.start.name, begin, ends[each.start]))
        last = max([busy, *(ends[each.start] for each in queued)])
        queued.clear()
        return last

    for node in order:
        line.at.append(now)
        if node in starts:
            queued.append(starts[node])
            if starts[node].transport not in table.late:
                busy = begin_queued()
        elif node in waited:
            busy = begin_queued()
            late = max(0.0, ends[waited[node]] - now)
            line.exposed[waited[node]] += late
            now += late
        elif time := times[node]:
            beside = min(time * table.contention, max(0.0, busy - now))
            begin, now = now, now + beside + (time - beside / table.contention)
            line.spans.append((COMPUTE, node.name, begin, now))
            busy = begin_queued()
    begin_queued()
    return line
