"""What became of the graphs at run time: for the whole process, and for each pass since it was made or cleared.

A graph that comes from Inductor's cache belongs to no pass. So each pass that is there at a run of a graph counts it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from ....kernels.device.jit.ahead import ProgramCounts, program_counts
from ..records.entry import Entry
from ..records.report import Disagreement, VoteCounts

_log = logging.getLogger("weft.passes")
_lock = threading.Lock()


class RunOutcomes:
    """What has been counted since it was made or reset. Any thread may ask."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int, str], int] = {}
        with _lock:
            self._before, self._programs = _votes_now(), program_counts()
            _all.add(self)

    def disagreements(self) -> tuple[Disagreement, ...]:
        """In the order in which they first came up."""
        with _lock:
            return tuple(Disagreement(*key, runs=runs) for key, runs in self._seen.items())

    def applied(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries as their graphs have run."""
        with _lock:
            runs = self._before.get(None, _NO_VOTES)[0]
            unfused = {graph for graph, *_ in self._seen if _last_fused.get(graph, 0) <= runs}
        return [
            replace(e, unfused=True) if e.fused_into is not None and e.signature in unfused else e
            for e in entries
        ]

    def questions(self, graphs: Collection[str | None] = (None,)) -> VoteCounts:
        """Of the graphs of these names; of all together by None."""
        with _lock:
            now = _votes_now()
        counts = [(now[g], self._before.get(g, _NO_VOTES)) for g in graphs if g in now]
        changes = [[a - b for a, b in zip(after, before, strict=True)] for after, before in counts]
        return VoteCounts(*map(sum, zip(_NO_VOTES, *changes, strict=True)))

    def programs(self) -> ProgramCounts:
        return program_counts() - self._programs

    def reset(self) -> None:
        with _lock:
            self._seen, self._before, self._programs = {}, _votes_now(), program_counts()

    def _note(self, key: tuple[str, str, int, str]) -> bool:
        """Whether it is new."""
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] == 1


_NO_VOTES = (0, 0, 0.0, 0)  # as in ``VoteCounts``
_votes: dict[str | None, list[Any]] = {}  # of this process, by graph, and of all by None


def _votes_now() -> dict[str | None, tuple[Any, ...]]:
    return {graph: tuple(counts) for graph, counts in _votes.items()}


_last_fused: dict[str, int] = {}  # by which of the runs a graph last ran fused
_all: weakref.WeakSet[RunOutcomes] = weakref.WeakSet()
_of_process = RunOutcomes()

disagreements = _of_process.disagreements
questions = _of_process.questions


def reset_outcomes() -> None:
    """Empties ``disagreements`` and ``questions``, and those of all passes."""
    with _lock:
        there = list(_all)
    for each in there:
        each.reset()


def count_vote(graph: str, fused: bool, seconds: float) -> None:
    """Of a graph by its name."""
    with _lock:
        _count(graph, fused, seconds, 0)


def count_known_run(graph: str) -> None:
    """Of a graph that ran fused without asking."""
    with _lock:
        _count(graph, True, 0.0, 1)


def _count(graph: str, fused: bool, seconds: float, known: int) -> None:
    for name in (None, graph):
        counts = _votes.setdefault(name, [*_NO_VOTES])
        counts[0] += 1
        counts[1] += fused
        counts[2] += seconds
        counts[3] += known
    if fused:
        _last_fused[graph] = _votes[None][0]


def note(graph: str, group: str, peer: int, reason: str) -> None:
    key = (graph, group, peer, reason)
    with _lock:
        new = [each._note(key) for each in _all]
    if any(new):  # to a pass that was made or cleared since, too
        _log.warning("%s", Disagreement(*key))
