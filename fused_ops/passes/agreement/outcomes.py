"""What became of the graphs at run time: for the whole process, and for each pass since it was made or cleared.

A graph that comes from Inductor's cache belongs to no pass. So each pass that is there at a run of a graph counts it.
"""

from __future__ import annotations

import logging
import threading
import weakref

from ..report import Disagreement, VoteCounts

_log = logging.getLogger("weft.passes")
_lock = threading.Lock()


class RunOutcomes:
    """What has been counted since it was made or reset. Any thread may ask."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int, str], int] = {}
        self._votes = VoteCounts()
        with _lock:
            _all.add(self)

    def disagreements(self) -> tuple[Disagreement, ...]:
        """In the order in which they first came up."""
        with _lock:
            return tuple(Disagreement(*key, runs=runs) for key, runs in self._seen.items())

    def questions(self) -> VoteCounts:
        return self._votes

    def reset(self) -> None:
        with _lock:
            self._seen, self._votes = {}, VoteCounts()

    def _count(self, fused: bool, seconds: float, ahead: bool) -> None:
        v = self._votes
        self._votes = VoteCounts(v.count + 1, v.fused + fused, v.seconds + seconds, v.ahead + ahead)

    def _note(self, key: tuple[str, str, int, str]) -> bool:
        """Whether it is new."""
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] == 1


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


def count_vote(fused: bool, seconds: float, *, ahead: bool = False) -> None:
    with _lock:
        for each in _all:
            each._count(fused, seconds, ahead)


def note(graph: str, group: str, peer: int, reason: str) -> None:
    key = (graph, group, peer, reason)
    with _lock:
        new = [each._note(key) for each in _all]
    if any(new):  # to a pass that was made or cleared since, too
        _log.warning("%s", Disagreement(*key))
