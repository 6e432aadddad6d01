"""What a pass has seen: the graphs that it ran on, and those that came from Inductor's cache as it makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx
from torch._inductor import config as inductor_config

from ..order.change import OrderChange
from ..pass_sequence import SLOT, passes_of
from .entry import Entry
from .models import Model, compilation_of_now, models_of_now
from .node import is_kept, packed, put_record, unpacked
from .report import PassRuns, Report
from .report_file import log_line, write_reports


@dataclass
class SeenGraph:
    """
    Attributes:
        models: of which it is.
        compilation: the pass, the frame, and which of the frame's compilations it is from; None where that is unknown.
        loaded: whether it came from a cache.
        entries: of its collectives.
        orders: what was moved in it.
        custom_ops: operators of a graph without collectives.
    """

    models: tuple[Model, ...]
    compilation: tuple[int, int, int] | None
    loaded: bool
    entries: list[Entry] = field(default_factory=list)
    orders: list[OrderChange] = field(default_factory=list)
    custom_ops: Sequence[str] = ()


class SeenGraphs:
    """
    Attributes:
        graphs: those of a pass by their numbers, or what was chosen of several passes'.
        keys: the models for whose graphs Inductor asked for the pass's key, each time.
    """

    def __init__(self, graphs: Iterable[SeenGraph] = (), keys: Iterable[tuple[Model, ...]] = ()) -> None:
        self._generated: Counter[str] = Counter()  # records of graphs whose code has not been loaded yet
        self.graphs, self.keys = [*graphs], [*keys]

    def clear(self) -> None:
        self.graphs, self.keys = [], []

    @property
    def entries(self) -> list[Entry]:
        return [e for graph in self.graphs for e in graph.entries]

    @property
    def orders(self) -> list[OrderChange]:
        return [order for graph in self.graphs for order in graph.orders]

    def runs(self, others: str = "") -> PassRuns:
        """``others``: passes that Inductor has in the place of this one, by name."""
        loaded = sum(graph.loaded for graph in self.graphs)
        compiled = {graph.compilation for graph in self.graphs if graph.compilation is not None}
        again = len(compiled) - len({frame[:2] for frame in compiled})
        ops = tuple(dict.fromkeys(op for graph in self.graphs for op in graph.custom_ops))
        return PassRuns(len(self.graphs) - loaded, len(self.keys), ops, others, loaded, again)

    def only(self, wanted: Callable[[tuple[Model, ...]], bool]) -> SeenGraphs:
        """Those of which the models are wanted."""
        return SeenGraphs((g for g in self.graphs if wanted(g.models)), filter(wanted, self.keys))

    def begin(self, *, loaded: bool = False) -> int:
        """The number of the graph on which the pass now runs, or that is loaded now."""
        now = compilation_of_now()
        self.graphs.append(SeenGraph(models_of_now(), now and (id(self), *now), loaded))
        return len(self.graphs) - 1

    def enter(self, number: int, entries: Iterable[Entry], orders: Iterable[OrderChange] = ()) -> None:
        """What became of the collectives of a graph."""
        graph = self.graphs[number]
        name = graph.models[0].name if graph.models else ""
        graph.entries += [replace(e, graph=number, model=name) for e in entries]
        graph.orders += [replace(order, graph=number) for order in orders]

    def of(self, number: int) -> Report:
        return Report(self.graphs[number].entries)

    def put_back(self, number: int, why: str) -> None:
        """Enters that what was done with a graph was undone."""
        graph = self.graphs[number]
        graph.entries = [e if e.fused_into is None else e.left_alone(why) for e in graph.entries]
        graph.orders = []

    def put_record(self, graph: fx.Graph, numbers: Sequence[int]) -> None:
        """Has the code of a graph tell of it, and of those that it calls, where that is kept and loaded again."""
        if not is_kept():
            return
        # The same text whichever model and number it has.
        found = (self.graphs[number] for number in sorted(numbers))
        kept = [
            ([replace(e, graph=0, model="") for e in g.entries], [replace(o, graph=0) for o in g.orders])
            for g in found
            if g.entries
        ]
        text = packed(kept)
        self._generated[text] += 1
        put_record(graph, text)

    def load(self, text: str) -> None:
        """Enters graphs that are loaded, unless the pass has just made them."""
        if self._generated[text]:
            self._generated -= Counter((text,))
            return
        for entries, orders in unpacked(text):
            number = self.begin(loaded=True)
            self.enter(number, entries, orders)
            log_line(number, self.of(number))
        write_reports()


def graph_loaded(text: str) -> None:
    """What generated code calls when it is loaded: for the report of the pass with which Inductor compiles now."""
    for each in passes_of(getattr(inductor_config, SLOT)):
        if isinstance(seen := getattr(each, "_seen", None), SeenGraphs):
            seen.load(text)
