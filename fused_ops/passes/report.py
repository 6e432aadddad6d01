"""What the pass did with each collective of the graphs it saw, and what became of the graphs at run time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')
_NONE = (
    "no collectives were seen (the pass does not see a graph that Inductor takes from its cache; "
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 has all graphs made anew)"
)
_TORCH = str(Path(torch.__file__).parent)


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
        count: runs of graphs that asked.
        fused: those that then ran fused.
        seconds: of the host, with the wait for ranks that came later.
    """

    count: int = 0
    fused: int = 0
    seconds: float = 0.0


NONE_ASKED = VoteCounts()


@dataclass(frozen=True)
class Entry:
    """One collective: fused into ``fused_into``, or left alone because of ``reason``.

    Attributes:
        graph: counts the graphs that the pass saw, from 0.
        node: the collective's name in the graph.
        collective: its kind, as torch calls it.
        group: over which it is.
        dim: the dimension along which the fused op gathers or scatters; None when left alone or where there is none.
        fused_into: the op, None when left alone.
        reason: the first condition that failed; "" when fused.
        detail: of a fused one: how many products were fused, and what else.
        source: the line of the model that it comes from; "" where torch kept none.
        form: what was found around the collective, in words; also of one that was found but does not pay.
        m, n, k: the product that this rank computes, [m, k] @ [k, n], with k = 0 what is reduced without its product;
        None when left alone, or not known before the run.
        gain: microseconds that fusing should save by ``worth.expected_gain``; None like m, n, k.
    """

    graph: int
    node: str
    collective: str
    group: str | None
    dim: int | None = None
    fused_into: str | None = None
    reason: str = ""
    detail: str = ""
    source: str = ""
    form: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    gain: float | None = None

    def left_alone(self, reason: str) -> Entry:
        """The same collective, found but left alone."""
        told = (self.graph, self.node, self.collective, self.group)
        return Entry(*told, reason=reason, source=self.source, form=self.form)

    def __str__(self) -> str:
        kind = "" if self.node.startswith(self.collective) else f" ({self.collective})"
        group = "" if self.group is None else f" over group {self.group!r}"
        head = f"graph {self.graph}: {self.node}{kind}{group}"
        if self.fused_into is not None:
            parts = [f"fused into {self.fused_into}"]
            parts += [] if self.dim is None else [f"dim {self.dim}"]
            parts += [self.detail] if self.detail else []
            if self.gain is not None:
                sizes = f"{self.m} x {self.k} @ {self.k} x {self.n}" if self.k else f"{self.m} x {self.n}"
                parts.append(sizes + (f" should save {self.gain:.3g} us" if self.gain else ""))
            body = ", ".join(parts)
        else:
            body = f"left alone: {self.reason}"
        form = f"  ({self.form})" if self.form else ""
        return f"{head}: {body}{form}{f'  [{self.source}]' if self.source else ''}"


@dataclass(frozen=True)
class Report:
    """The entries in the order of graphs and of collectives in a graph; ``str()`` gives one line each.

    >>> from weft.fused_ops import FusionPass
    >>> report = FusionPass().report()
    >>> for entry in report.entries:
    ...     print(entry.collective, entry.fused_into, entry.reason)
    >>> report.fused, report.left
    (0, 0)

    Attributes:
        entries: what became of each collective.
        disagreements: graphs that ran unfused in this process because the ranks stood before different ones.
        questions: how often this process's graphs asked the other ranks, and what that cost.
    """

    entries: tuple[Entry, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    questions: VoteCounts = NONE_ASKED

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        disagreements: Iterable[Disagreement] = (),
        questions: VoteCounts = NONE_ASKED,
    ) -> None:
        object.__setattr__(self, "entries", tuple(entries))
        object.__setattr__(self, "disagreements", tuple(disagreements))
        object.__setattr__(self, "questions", questions)

    @property
    def fused(self) -> int:
        """How many collectives were fused."""
        return sum(e.fused_into is not None for e in self.entries)

    @property
    def left(self) -> int:
        """How many collectives were left alone."""
        return len(self.entries) - self.fused

    @property
    def gain(self) -> float:
        """Microseconds that one run of every graph should save, as far as that is known."""
        return sum(e.gain or 0.0 for e in self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "\n".join([_NONE, *map(str, self.disagreements)])
        lines = [str(e) for e in self.entries]
        return "\n".join(
            [*lines, f"{self.fused} of {len(lines)} collectives fused", *map(str, self.disagreements)]
        )

    def __repr__(self) -> str:
        return f"Report(fused={self.fused}, left={self.left}, disagreements={len(self.disagreements)})"


def source_of(node: fx.Node) -> str:
    """``file:line in function: code`` of the innermost frame outside of torch, or ""."""
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return ""
    frames = list(_FRAME.finditer(trace))
    outside = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not outside:
        return ""
    frame = outside[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}: {frame['code'].strip()}"
