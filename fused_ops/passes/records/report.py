"""What the pass did with each collective of the graphs it saw, and what became of the graphs at run time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ....kernels.device.jit.ahead import NO_PROGRAMS, ProgramCounts
from ....symm_mem import Group
from ...about.timeline import timeline_html
from ...pictures.page import details_html, page, table_html, text_html
from ..order.change import OrderChange
from . import table
from .entry import Entry, as_ranges


@dataclass(frozen=True)
class Disagreement:
    """A graph that ran unfused because the ranks stood before different graphs.

    Attributes:
        graph: the signature of this rank's graph.
        group: in which group the ranks differed.
        peer: the rank that this one differs from.
        reason: what differs.
        runs: how often so far.
    """

    graph: str
    group: str
    peer: int
    reason: str
    runs: int = 1

    def __str__(self) -> str:
        times = f"{self.runs} times" if self.runs > 1 else "once"
        return f"graph {self.graph} ran unfused {times}: in group {self.group!r}, {self.reason}"


@dataclass(frozen=True)
class VoteCounts:
    """What asking has cost this process.

    Attributes:
        count: runs of graphs that ask, also of those that had to ask nobody, and of those that all know.
        fused: those that then ran fused.
        seconds: of the host while it asked, with the wait for ranks that came later.
        known: those that ran fused without asking, as all ranks know the graph.
    """

    count: int = 0
    fused: int = 0
    seconds: float = 0.0
    known: int = 0

    def __str__(self) -> str:
        asked = self.count - self.known
        each = f", {self.seconds / asked * 1e3:.2f} ms each" if asked else ""
        known = f"; {self.known} did not, as all ranks know the graph" if self.known else ""
        return f"votes: {asked} run{'s' * (asked != 1)} asked the other ranks{each}{known}"


NONE_ASKED = VoteCounts()


@dataclass(frozen=True)
class PassRuns:
    """How often Inductor turned to a pass, since it was made or cleared.

    Attributes:
        graphs: graphs that it ran on.
        keys: how often it was asked for its key, as Inductor does before it looks into its cache.
        custom_ops: operators, neither torch's nor weft's, of the graphs without functional collectives.
        others: passes that torch._inductor.config has in its place, by name.
        loaded: graphs with functional collectives that Inductor took from its cache, as the pass makes them.
        again: compilations of what was compiled before for other shapes or values.
    """

    graphs: int = 0
    keys: int = 0
    custom_ops: tuple[str, ...] = ()
    others: str = ""
    loaded: int = 0
    again: int = 0

    def why_no_entries(self) -> str:
        if self.graphs:
            one = self.graphs == 1
            graphs = "one graph, which" if one else f"{self.graphs} graphs, none of which"
            text = f"the pass ran on {graphs} has {'no' if one else 'a'} functional collective"
            return text + (f" (custom ops: {', '.join(self.custom_ops)})" if self.custom_ops else "")
        if self.keys:
            return (
                "Inductor asked for the pass's key but did not run it: the graphs came from its cache, and have no "
                "functional collective"
            )
        instead = f"; torch._inductor.config has {self.others} in its place" if self.others else ""
        return (
            "the pass has not run: no graph was compiled with its options by Inductor (nothing was called yet, another "
            f"backend or another pass in its place, or inside of another torch.compile, whose options count){instead}"
        )


NO_RUNS = PassRuns()


def text_of(entries: list[Entry]) -> str:
    """One line for entries that are alike."""
    first = entries[0]
    if len(entries) == 1:
        return str(first)
    graphs = as_ranges([str(e.graph) for e in entries])
    where = first._where(as_ranges([e.module for e in entries]))
    several = f"graph{'s' * (graphs != str(first.graph))} {graphs}{first._of_model()}"
    return f"{several}: {first.collective}{where}: {first._outcome()} ({len(entries)} times)"


class HeapUse(NamedTuple):
    """Memory of the heap on each rank, for graphs that run one after the other in a stream.

    Attributes:
        calls: of which the plans are known.
        shared: bytes that they need. Calls around matmuls share one workspace, all-reduces another.
        apart: bytes that they would need if each had its own.
    """

    calls: int = 0
    shared: int = 0
    apart: int = 0

    def __str__(self) -> str:
        shared, apart = (f"{size / 2**20:.3g} MiB" for size in (self.shared, self.apart))
        return f"heap: {shared} that {self.calls} calls share; {apart} if each had its own"


@dataclass(frozen=True)
class Report:
    """The entries in the order of graphs and of collectives in a graph.

    >>> from weft.fused_ops import FusionPass
    >>> report = FusionPass().report()
    >>> for entry in report.entries:
    ...     print(entry.collective, entry.fused_into, entry.reason)
    >>> report.fused, report.left
    (0, 0)

    ``str()`` is a table by layer (``layers.0-31`` is one row), what was left alone by reason with what to do about it,
    and what the run itself said: votes, graphs that ran unfused, recompilations, kernels. ``table()`` is the table
    alone, ``details()`` says all of each collective, ``to_json()`` is for programs and ``to_html()`` for browsers.

    Attributes:
        entries: what became of each collective.
        disagreements: graphs that ran unfused in this process because the ranks stood before different ones.
        questions: how often this process's graphs asked the other ranks, and what that cost.
        runs: how often Inductor turned to the pass.
        programs: kernels that this process has compiled since the pass was made or cleared, whoever needed them.
        orders: what ``reorder`` did with each graph.
    """

    entries: Sequence[Entry] = ()
    disagreements: Sequence[Disagreement] = ()
    questions: VoteCounts = NONE_ASKED
    runs: PassRuns = NO_RUNS
    orders: Sequence[OrderChange] = ()
    programs: ProgramCounts = NO_PROGRAMS

    def __post_init__(self) -> None:
        for name in ("entries", "disagreements", "orders"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def fused(self) -> int:
        """How many collectives were fused, but for those of graphs that have run unfused each time."""
        return sum(e.fused for e in self.entries)

    @property
    def left(self) -> int:
        """How many collectives run unfused: left alone, or in graphs that have run unfused each time."""
        return len(self.entries) - self.fused

    @property
    def _shown(self) -> Sequence[Entry]:
        """With the names of models where there are several."""
        several = len({e.model for e in self.entries}) > 1
        return self.entries if several else [replace(e, model="") for e in self.entries]

    @property
    def heap(self) -> HeapUse:
        """What the calls need of the heap, as far as their plans are known."""
        plans = [e.plan for e in self.entries if e.plan is not None and e.plan.workspace_bytes]
        most: dict[str, int] = {}
        for plan in plans:
            most[plan.workspace] = max(most.get(plan.workspace, 0), plan.workspace_bytes)
        return HeapUse(len(plans), sum(most.values()), sum(plan.workspace_bytes for plan in plans))

    @property
    def gain(self) -> float:
        """Microseconds that one run of every graph should save, as far as that is known."""
        return sum(e.gain or 0.0 for e in self.entries if not e.unfused)

    def __str__(self) -> str:
        if not self.entries:
            return self.details()
        counts = [table.summary_of(self.entries), *table.advice_of(self.entries)]
        return "\n".join([self.table(), "", *table.wrapped([*counts, *self._told(), *map(str, self.orders)])])

    def table(self) -> str:
        """A row for each collective of a kind of layer: what became of it, and what that saves.

        >>> from weft.fused_ops import FusionPass
        >>> print(FusionPass().report().table())
        in  collective  times  each  became  saves
        """
        return "\n".join(table.table_lines(self._shown))

    def details(self) -> str:
        """One line for each collective, those that differ in numbers of graphs, nodes and modules only as one.

        >>> from weft.fused_ops import FusionPass
        >>> text = FusionPass().report().details()
        >>> text.startswith("no collectives were seen")
        True
        """
        if not self.entries:
            return "\n".join([f"no collectives were seen: {self.runs.why_no_entries()}", *self._ran()])
        groups: dict[tuple[str, ...], list[Entry]] = {}
        for entry in self._shown:
            groups.setdefault(entry.alike(), []).append(entry)
        lines = [text_of(group) for group in groups.values()]
        return "\n".join([*lines, table.summary_of(self.entries), *self._told(), *map(str, self.orders)])

    def to_json(self) -> str:
        """All fields as JSON, one object.

        >>> import json
        >>> from weft.fused_ops import FusionPass
        >>> json.loads(FusionPass().report().to_json())["entries"]
        []
        """
        return json.dumps(asdict(self), default=str)

    def to_html(self, call: Callable[[], object] | None = None, *, group: Group = None) -> str:
        """A page for a browser, in one file: the table, the timeline of a call, the picture of each order, the details.

        >>> from weft.fused_ops import FusionPass
        >>> page = FusionPass().report().to_html()
        >>> page.startswith("<!doctype html>")
        True

        Given a call, all ranks of the group make it, and the page has what was measured of it, as
        ``weft.passes.timeline`` draws it. The picture of an order that ``reorder`` made has what is predicted: when
        each collective and matmul runs, bytes held over time, and what hides each collective.

        Args:
            call: takes nothing, as a training step; None for a page without its timeline, made by one rank alone.
            group: of the call: a name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

        Returns:
            the page as text.

        Raises:
            TypeError: ``call`` cannot be called.
        """
        measured = [] if call is None else [timeline_html(call, group=group)]
        counts = [table.summary_of(self.entries), *table.advice_of(self.entries), *self._told()]
        rows = table_html(table.HEAD, table.table_rows(self._shown), table.NUMBERS)
        return page(
            "weft: what became of each collective",
            [
                *([rows, text_html("\n".join(counts))] if self.entries else []),
                *measured,
                *(order.html() for order in self.orders),
                details_html("each collective", self.details(), opened=not self.entries),
            ],
        )

    def _ran(self) -> list[str]:
        votes = [str(self.questions)] if self.questions.count else []
        times = "once" if self.runs.again == 1 else f"{self.runs.again} times"
        again = [f"torch compiled again {times}: TORCH_LOGS=recompiles says why"] if self.runs.again else []
        kernels = [f"kernels: {self.programs}"] if self.programs != NO_PROGRAMS else []
        return [*votes, *map(str, self.disagreements), *again, *kernels]

    def _told(self) -> list[str]:
        """What is said once, of all entries and of the run."""
        heap = [str(self.heap)] if self.heap.calls else []
        return [*table.reasons_of(self.entries), *heap, *self._ran()]

    def __repr__(self) -> str:
        return f"Report(fused={self.fused}, left={self.left}, disagreements={len(self.disagreements)})"


class FusionError(RuntimeError):
    """A strict pass left a collective alone.

    >>> from weft.fused_ops import FusionError, FusionPass
    >>> error = FusionError(FusionPass(strict=True).report())
    >>> error.report.left
    0

    Attributes:
        report: that of the graph.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(
            f"{report.left} of {len(report.entries)} collectives were not fused\n{report.details()}"
        )
        self.report = report
