"""What became of the graphs at run time, for the whole process: a graph that comes from a cache belongs to no pass."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

_log = logging.getLogger("weft.passes")


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


_seen: dict[tuple[str, str, int, str], int] = {}
_questions = VoteCounts()
_lock = threading.Lock()


def disagreements() -> tuple[Disagreement, ...]:
    """Those of this process since it started or ``forget`` was called, in the order in which they first came up."""
    with _lock:
        return tuple(Disagreement(*key, runs=runs) for key, runs in _seen.items())


def questions() -> VoteCounts:
    """Since the process started or ``forget`` was called."""
    return _questions


def reset_outcomes() -> None:
    """Empties ``disagreements`` and ``questions``."""
    global _questions
    with _lock:
        _seen.clear()
        _questions = VoteCounts()


def count_vote(fused: bool, seconds: float) -> None:
    global _questions
    with _lock:
        q = _questions
        _questions = VoteCounts(q.count + 1, q.fused + fused, q.seconds + seconds)


def note(graph: str, group: str, peer: int, reason: str) -> None:
    key = (graph, group, peer, reason)
    with _lock:
        first = key not in _seen
        _seen[key] = _seen.get(key, 0) + 1
    if first:
        _log.warning("%s", Disagreement(*key))
