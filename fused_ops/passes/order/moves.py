"""Raises the start of each collective and sinks its wait, so that what is computed between hides it.

One collective after the other, in their order: its start moves up, with the light kernels that it needs before it,
and its waits down, with the light ones that use them, one node at a time, until what is passed takes as long as the
collective. It stops at what it needs, at a collective that it may not pass, where too many would be on their way, and
where a byte more would be needed than is allowed. All of it is a function of the graph and of the table of costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from ....symm_mem.layout import NUM_BUFFERS
from ..graph.collectives import communicates, group_of, waits
from ..graph.nodes import what
from ..memory.alias_sets import HEAP, AliasSet, AliasSets
from ..memory.hazards import Hazards
from ..memory.live_bytes import LiveBytes, body, put_in_order
from .change import OrderChange, Placed
from .copy_engines import gathers_in_buffers, mark_placed, place_gathers
from .costs import CostTable, kernel_time, transfer_time
from .exposure import Timeline, timeline_of
from .least_memory import is_light, order_of_least_memory
from .transports import COPIED, Transfer, transfers

_TAKEN_ALONG = 32  # nodes, at most, that move with a start or a wait
_COVER = 1.5  # how much longer than a collective what runs beside it should take, as it is estimated
_FOR_LESS_MEMORY = 0.02  # of the graph's time that may be exposed more, where less memory is needed
_COVERED = "what overlaps with it takes as long"


@dataclass(frozen=True)
class OrderLimits:
    """What a new order may need.

    Attributes:
        memory: how much the peak may grow, as a part of it.
        beside: whether collectives may be on their way while an op of weft runs: on CUDA its kernel takes all SMs but
            those that are reserved.
        voted: groups whose ranks compare the order before each run. Only their collectives may pass one of another
            transport. None: all, as ranks are known to run the same.
    """

    memory: float = 0.0
    beside: bool = False
    voted: Collection[str] | None = ()


class _Walk:
    """The order as it is being changed."""

    def __init__(self, graph: fx.Graph, table: CostTable, limits: OrderLimits) -> None:
        self.limits, self.table = limits, table
        self.sets = AliasSets(graph)
        self.given = body(graph)
        self.live = LiveBytes(self.sets.sets, self.given)
        self.hazards = Hazards(self.sets, self.given)
        self.times = {n: kernel_time(n, table) for n in self.given}
        self.transfers = transfers(self.given)
        for each in self.transfers:
            each.time = transfer_time(each.start, each.transport, table)
        self.of_start = {t.start: t for t in self.transfers}
        self.of_wait = {w: t for t in self.transfers for w in t.waits}
        self.bound = self._bound(self.live.peak)
        self.placed: dict[fx.Node, AliasSet] = {}
        self.buffers = LiveBytes((), self.given)

    def start_from_least_memory(self) -> None:
        """Takes the order that needs the least memory, or the given one if that needs less, and allows no more. What
        copy engines then gather on the heap is not torch's memory, in this order and in each that follows."""
        least = LiveBytes(self.sets.sets, order_of_least_memory(self.given, self.hazards, self.transfers))
        self.bound = self._bound(min(least.peak, self.live.peak))
        order = least.order if least.peak <= self.bound else self.given
        self.placed = gathers_in_buffers(order, self.sets)
        for made in self.placed.values():
            made.pool = HEAP
        self.live = LiveBytes(self.sets.sets, order)
        self.buffers = LiveBytes(self._buffers(), order)

    def _buffers(self) -> list[AliasSet]:
        """Of each gather on the heap its buffer, from its start to the last reader: a set of size 1."""
        return [AliasSet(1, nodes=[n, *s.nodes]) for n, s in self.placed.items()]

    def _bound(self, peak: int) -> int:
        return int(peak * (1 + self.limits.memory))

    def kernels_before(self) -> dict[fx.Node, int]:
        """How many kernels that may hide something stand before each node."""
        found, count = {}, 0
        for node in self.live.order:
            found[node] = count
            count += self.times[node] > 0
        return found

    def timeline(self) -> Timeline:
        return timeline_of(self.live, self.transfers, self.times, self.table)

    def in_flight(self, place: int, transport: str) -> list[Transfer]:
        """Those of a transport that are on their way at a place of the order."""
        at = self.live.at
        return [
            t
            for t in self.transfers
            if t.transport == transport
            and at[t.start] < place
            and (not t.waits or place <= max(at[w] for w in t.waits))
        ]

    def _queued_more(self, other: fx.Node, transfer: Transfer) -> float:
        """How many microseconds more its transport carries out first, where its start moves up past ``other``."""
        met = self.of_wait.get(other, self.of_start.get(other))
        if met is None or met.transport != transfer.transport:
            return 0.0
        last = max(met.waits, key=self.live.at.__getitem__, default=None)
        return met.time * ((other is last) - (other is met.start))

    def waits_of(self, transfer: Transfer) -> list[list[fx.Node]]:
        """What moves together, the last first: the waits of a coalesced collective, where only they stand there."""
        waits_in_order = sorted(transfer.waits, key=self.live.at.__getitem__)
        first, last = (self.live.at[w] for w in (waits_in_order[0], waits_in_order[-1]))
        together = self.live.order[first : last + 1]
        own = {*transfer.waits, *(n for w in transfer.waits for n in w.all_input_nodes)}
        return [together] if own.issuperset(together) else [[w] for w in reversed(waits_in_order)]

    def move_both(self, transfer: Transfer) -> tuple[str, str]:
        """Moves a start up and its waits down; gives why neither moved further."""
        if not transfer.waits:
            return "nothing waits for it", "there is none"
        why_start, why_wait = self.move(transfer, [transfer.start], up=True), ""
        for nodes in self.waits_of(transfer):
            why_wait = self.move(transfer, nodes, up=False)
        return why_start, why_wait

    def move(self, transfer: Transfer, nodes: list[fx.Node], up: bool) -> str:
        """Moves a start up, or waits down, ``nodes`` that stand next to each other; gives why not further."""
        live, block = self.live, [*nodes]
        idle: list[tuple[int, list[fx.Node]]] = []  # what was where, before moves that hide nothing
        # What its transport carries out first of all that is on its way where it starts.
        queued = sum(t.time for t in self.in_flight(live.at[transfer.start], transfer.transport))
        first_wait = min(live.at[w] for w in transfer.waits)
        kernels = [us for n in live.order[live.at[transfer.start] : first_wait] if (us := self.times[n])]
        late = transfer.transport in self.table.late
        # A late one begins after the first of them.
        needed = _COVER * transfer.time + queued - self.table.contention * sum(kernels[late:])
        next_one = kernels[:1] if late else []
        while needed > 0:
            edge = live.at[block[0]] - 1 if up else live.at[block[-1]] + 1
            if not 0 <= edge < len(live.order):
                why = f"it is at the {'beginning' if up else 'end'}"
                break
            other = live.order[edge]
            if len(block) < _TAKEN_ALONG and self._goes_along(other, block, transfer, up):
                block = [other, *block] if up else [*block, other]
                continue
            if (reason := self._why_not_past(transfer, other, block, up)) is not None:
                why = reason
                break
            first = edge if up else live.at[block[0]]
            window = [*block, other] if up else [other, *block]
            after = live.rearranged(first, window)
            if max(after) > self.bound:
                why = f"past {other.name} the peak would be {max(after)} bytes, {self.bound} are allowed"
                break
            if max(self.buffers.rearranged(first, window)) > NUM_BUFFERS:
                why = f"past {other.name} it has no buffer on the heap"
                break
            idle.append((first, live.order[first : first + len(window)]))
            self._rearrange(first, window, after)
            if up:
                needed += self._queued_more(other, transfer)
            if time := self.times[other]:
                if late:  # the first kernel of all that are passed hides nothing
                    kernels = [time, *next_one] if up else [*next_one, time]
                    next_one, time = kernels[:1], sum(kernels[1:])
                needed -= time * self.table.contention
                if time:
                    idle.clear()
        else:
            why = _COVERED
        for first, window in reversed(idle):
            self._rearrange(first, window)
        return why

    def _rearrange(self, first: int, window: list[fx.Node], after: list[int] | None = None) -> None:
        self.live.rearrange(first, window, after)
        self.buffers.rearrange(first, window)

    def _depends(self, other: fx.Node, block: Iterable[fx.Node], up: bool) -> bool:
        before = self.hazards.before
        return any(other in before[n] if up else n in before[other] for n in block)

    def _goes_along(self, other: fx.Node, block: list[fx.Node], transfer: Transfer, up: bool) -> bool:
        """What is light and belongs to what moves; and a start above, which the one that moves may not pass."""
        if self._depends(other, block, up):
            return is_light(other, self.hazards)
        met = self.of_start.get(other) if up else None
        if met is None or met.transport != transfer.transport or met.transport == COPIED:
            return False
        return not self._may_pass(transfer, other)

    def _why_not_past(self, transfer: Transfer, other: fx.Node, block: list[fx.Node], up: bool) -> str | None:
        if self.hazards.segment[other] != self.hazards.segment[block[0]]:
            return f"nothing moves past {what(other)}"
        if self._depends(other, block, up):
            return f"it needs {other.name}" if up else f"{other.name} needs it"
        if not communicates(other) and not waits(other):
            return None
        blocking = communicates(other) and other not in self.of_start
        if blocking and not (self.limits.beside or transfer.transport == COPIED):
            return f"{other.name} runs with nothing on its way"
        raised = [self.of_start[n] for n in block if n in self.of_start] if up else []
        if communicates(other) and not all(self._may_pass(t, other) for t in raised):
            return f"collectives keep their order after {other.name}"
        # Up past a wait, or down past a start: one more is on its way.
        met = self.of_wait.get(other) if up else self.of_start.get(other)
        if transfer.transport != COPIED or met is None or met is transfer or met.transport != COPIED:
            return None
        if up and other is not max(met.waits, key=self.live.at.__getitem__):
            return None
        there = [t for t in self.in_flight(self.live.at[other], COPIED) if t is not transfer and t is not met]
        if len(there) + 2 > NUM_BUFFERS:
            return f"with {met.start.name} more than {NUM_BUFFERS} would be on their way"
        if transfer.gathers and met.gathers:
            return f"with {met.start.name} two all-gathers would be on their way"
        return None

    def _may_pass(self, transfer: Transfer, other: fx.Node) -> bool:
        met = self.of_start.get(other)
        if met is not None and met.transport == transfer.transport and (met.gathers or not transfer.gathers):
            return False
        voted = self.limits.voted
        return voted is None or (transfer.group in voted and group_of(other) in voted)

    def crossings(self) -> list[tuple[fx.Node, fx.Node]]:
        """Collectives that now stand before others, after which they were given."""
        at, given = self.live.at, [n for n in self.given if communicates(n)]
        return [(late, early) for i, late in enumerate(given) for early in given[:i] if at[late] < at[early]]

    def why_invalid(self) -> str | None:
        """What is wrong with the order as it is now; None if it is right."""
        if (why := self.hazards.why_invalid(self.live.order)) is not None:
            return why
        for late, early in self.crossings():
            transfer = self.of_start.get(late)
            if transfer is None or not self._may_pass(transfer, early):
                return f"{late.name} has passed {early.name}"
        copied = [self.live.at[t.start] for t in self.transfers if t.transport == COPIED]
        if any(len(self.in_flight(place + 1, COPIED)) > NUM_BUFFERS for place in copied):
            return f"more than {NUM_BUFFERS} collectives of {COPIED} would be on their way"
        anew = LiveBytes(self.sets.sets, self.live.order)
        if anew.peak > self.bound:
            return f"the peak would be {anew.peak} bytes, {self.bound} are allowed"
        if LiveBytes(self._buffers(), self.live.order).peak > NUM_BUFFERS:
            return "more would be on the heap than it has buffers for"
        return None


def reorder(graph: fx.Graph, table: CostTable, limits: OrderLimits | None = None) -> OrderChange:
    """Changes the order of a graph's nodes, if that hides more of its collectives; else leaves it. Then it is final:
    what copy engines gather stays where it comes to as far as it can."""
    limits = limits or OrderLimits()
    walk = _Walk(graph, table, limits)
    peak, before, given = walk.live.peak, walk.timeline(), walk.kernels_before()
    walk.start_from_least_memory()
    whys = {transfer.start: walk.move_both(transfer) for transfer in walk.transfers}
    kept = _why_kept(walk, peak, before.total, walk.timeline().total)
    crossed = {g for pair in walk.crossings() for g in map(group_of, pair) if g and not kept}
    if not kept:
        put_in_order(graph, walk.live.order)
        mark_placed(walk.placed)
    if place_gathers(graph) or kept:
        walk = _Walk(graph, table, limits)
    after, now = walk.timeline(), walk.kernels_before()
    placed = []
    for transfer in walk.transfers:
        node, last = transfer.start, [transfer.start, *transfer.waits][-1]
        name, kind, hidden = node.name, transfer.transport, after.beside(node.name)
        start, wait = (now[n] - given[n] for n in (node, last))
        times = before.exposed[name], after.exposed[name]
        placed.append(Placed(name, kind, start, wait, *times, *whys[node], hidden))
    totals, peaks = (before.total, after.total), (peak, walk.live.peak)
    return OrderChange(0, tuple(placed), *totals, *peaks, kept, frozenset(crossed), (before, after))


def _why_kept(walk: _Walk, peak: int, before: float, after: float) -> str:
    """Why the order given is as good; "" where it is not."""
    if not walk.transfers:
        return "no collective overlaps with anything"
    if walk.live.order == walk.given:
        return "nothing can be moved"
    if (why := walk.why_invalid()) is not None:
        return f"the new one is not right: {why}"
    if after < before:
        return ""
    allowed = before + _FOR_LESS_MEMORY * sum(walk.times.values())
    if walk.live.peak < peak and after <= allowed:
        return ""
    return "the new one hides no more"
