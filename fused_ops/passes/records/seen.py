"""What a pass has seen: the graphs that it ran on, and those that came from Inductor's cache as it makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx
from torch._inductor import config as inductor_config

from ..order.change import OrderChange
from ..pass_sequence import SLOT, passes_of
from .entry import Entry
from .node import is_kept, packed, put_record, unpacked
from .report import Report
from .report_file import log_line, write_reports


class SeenGraphs:
    """
    Attributes:
        entries: of the collectives of all of them.
        orders: likewise.
        ran: how many graphs the pass ran on.
        loaded: how many with collectives came from a cache.
    """

    def __init__(self) -> None:
        self._generated: Counter[str] = Counter()  # records of graphs whose code has not been loaded yet
        self.clear()

    def clear(self) -> None:
        self.entries: list[Entry] = []
        self.orders: list[OrderChange] = []
        self.ran = self.loaded = 0

    def begin(self) -> int:
        """The number of the graph on which the pass now runs."""
        self.ran += 1
        return self.ran + self.loaded - 1

    def enter(self, entries: Iterable[Entry], order: OrderChange | None) -> None:
        self.entries += entries
        self.orders += [] if order is None else [order]

    def of(self, number: int) -> Report:
        return Report([e for e in self.entries if e.graph == number])

    def put_back(self, number: int, why: str) -> None:
        """Enters that what was done with a graph was undone."""
        self.entries = [
            e.left_alone(why) if e.graph == number and e.fused_into is not None else e for e in self.entries
        ]
        self.orders = [o for o in self.orders if o.graph != number]

    def put_record(self, graph: fx.Graph, numbers: Sequence[int]) -> None:
        """Has the code of a graph tell of it, and of those that it calls, where that is kept and loaded again."""
        if not is_kept():
            return
        found = [e for e in self.entries if e.graph in numbers]
        places = {number: place for place, number in enumerate(sorted({e.graph for e in found}))}
        entries = [replace(e, graph=places[e.graph]) for e in found]
        orders = [replace(o, graph=places[o.graph]) for o in self.orders if o.graph in places]
        text = packed((len(places), entries, orders))
        self._generated[text] += 1
        put_record(graph, text)

    def load(self, text: str) -> None:
        """Enters a graph that is loaded, unless the pass has just made it."""
        if self._generated[text]:
            self._generated -= Counter((text,))
            return
        count, entries, orders = unpacked(text)
        first = self.ran + self.loaded
        self.loaded += count
        self.entries += (replace(e, graph=first + e.graph) for e in entries)
        self.orders += (replace(o, graph=first + o.graph) for o in orders)
        for number in range(first, first + count):
            log_line(number, self.of(number))
        write_reports()


def graph_loaded(text: str) -> None:
    """What generated code calls when it is loaded: for the report of the pass with which Inductor compiles now."""
    for each in passes_of(getattr(inductor_config, SLOT)):
        if isinstance(seen := getattr(each, "_seen", None), SeenGraphs):
            seen.load(text)
