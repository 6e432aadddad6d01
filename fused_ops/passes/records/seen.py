"""What a pass has seen: the graphs that it ran on, and those that came from Inductor's cache as it makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import fx
from torch._inductor import config as inductor_config

from ..order.change import OrderChange
from ..pass_sequence import SLOT, passes_of
from .entry import Entry
from .models import Model, compilation_of_now, models_of_now
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
        models: of each of these graphs, by its number.
        from_cache: the numbers of those that were loaded.
        compilations: by number of graph, the frame and which of its compilations it is from.
        keys: the models for whose graphs Inductor asked for the pass's key, each time.
        custom_ops: by number of graph, operators of graphs without collectives.
    """

    def __init__(self) -> None:
        self._generated: Counter[str] = Counter()  # records of graphs whose code has not been loaded yet
        self.clear()

    def clear(self) -> None:
        self.entries: list[Entry] = []
        self.orders: list[OrderChange] = []
        self.models: dict[int, tuple[Model, ...]] = {}
        self.from_cache: set[int] = set()
        self.compilations: dict[int, tuple[int, int]] = {}
        self.keys: list[tuple[Model, ...]] = []
        self.custom_ops: dict[int, Sequence[str]] = {}

    @property
    def ran(self) -> int:
        return len(self.models) - self.loaded

    @property
    def loaded(self) -> int:
        return len(self.from_cache)

    @property
    def again(self) -> int:
        """Compilations of frames that were compiled for this before; those of other passes do not count."""
        found = {*self.compilations.values()}
        return len(found) - len({frame for frame, _ in found})

    def only(self, wanted: Callable[[tuple[Model, ...]], bool]) -> SeenGraphs:
        """Those of which the models are wanted."""
        found = SeenGraphs()
        found.models = {number: models for number, models in [*self.models.items()] if wanted(models)}
        found.entries = [e for e in self.entries if e.graph in found.models]
        found.orders = [o for o in self.orders if o.graph in found.models]
        found.from_cache = self.from_cache & found.models.keys()
        found.compilations = {n: of for n, of in self.compilations.items() if n in found.models}
        found.keys = [models for models in self.keys if wanted(models)]
        found.custom_ops = {n: ops for n, ops in self.custom_ops.items() if n in found.models}
        return found

    def begin(self) -> int:
        """The number of the graph on which the pass now runs."""
        models = models_of_now()
        number = len(self.models)
        self.models[number] = models
        self._note_compilation([number])
        return number

    def _note_compilation(self, numbers: Iterable[int]) -> None:
        if now := compilation_of_now():
            self.compilations |= dict.fromkeys(numbers, now)

    def enter(self, entries: Iterable[Entry], order: OrderChange | None) -> None:
        for e in entries:
            models = self.models.get(e.graph)
            self.entries.append(replace(e, model=models[0].name) if models else e)
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
        entries = [replace(e, graph=places[e.graph], model="") for e in found]
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
        first = len(self.models)
        numbers = range(first, first + count)
        self.models |= dict.fromkeys(numbers, models_of_now())
        self.from_cache.update(numbers)
        self._note_compilation(numbers)
        self.enter((replace(e, graph=first + e.graph) for e in entries), None)
        self.orders += (replace(o, graph=first + o.graph) for o in orders)
        for number in numbers:
            log_line(number, self.of(number))
        write_reports()


def graph_loaded(text: str) -> None:
    """What generated code calls when it is loaded: for the report of the pass with which Inductor compiles now."""
    for each in passes_of(getattr(inductor_config, SLOT)):
        if isinstance(seen := getattr(each, "_seen", None), SeenGraphs):
            seen.load(text)
