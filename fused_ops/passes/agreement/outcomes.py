"""What became of the graphs at run time: counted for the whole process, and told for each pass since it was made or
cleared. A graph that comes from Inductor's cache belongs to no pass.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from ....kernels.device.jit.ahead import ProgramCounts, program_counts
from ..records.entry import Entry
from ..records.report import Disagreement, VoteCounts

_log = logging.getLogger("weft.passes")
_lock = threading.Lock()
_NO_VOTES = (0, 0, 0.0, 0)  # as in ``VoteCounts``
# Of this process: by graph, and of all by None.
_votes: dict[str | None, tuple[Any, ...]] = {}
_notes: Counter[tuple[str, str, int, str]] = Counter()
_last_fused: dict[str, int] = {}  # by which of the runs a graph last ran fused


class RunOutcomes:
    """What has been counted since it was made or reset. Any thread may ask."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        with _lock:
            self._votes, self._notes, self._programs = {**_votes}, Counter(_notes), program_counts()

    def disagreements(self) -> tuple[Disagreement, ...]:
        """In the order in which they first came up."""
        with _lock:
            return tuple(Disagreement(*key, runs=runs) for key, runs in (_notes - self._notes).items())

    def applied(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries as their graphs have run."""
        with _lock:
            runs = self._votes.get(None, _NO_VOTES)[0]
            unfused = {g for g, *_ in _notes - self._notes if _last_fused.get(g, 0) <= runs}
        return [
            replace(e, unfused=True) if e.fused_into is not None and e.signature in unfused else e
            for e in entries
        ]

    def questions(self, graphs: Collection[str | None] = (None,)) -> VoteCounts:
        """Of the graphs of these names; of all together by None."""
        with _lock:
            counts = [(_votes[g], self._votes.get(g, _NO_VOTES)) for g in graphs if g in _votes]
        changes = [[a - b for a, b in zip(after, before, strict=True)] for after, before in counts]
        return VoteCounts(*map(sum, zip(_NO_VOTES, *changes, strict=True)))

    def programs(self) -> ProgramCounts:
        return program_counts() - self._programs


def count_vote(graph: str, fused: bool, seconds: float, known: bool = False) -> None:
    """Of a graph by its name. ``known``: it ran fused without asking."""
    with _lock:
        for name in (graph, None):
            runs, ran_fused, waited, unasked = _votes.get(name, _NO_VOTES)
            _votes[name] = runs + 1, ran_fused + fused, waited + seconds, unasked + known
        if fused:
            _last_fused[graph] = runs + 1  # of all


def note(graph: str, group: str, peer: int, reason: str) -> None:
    """Why a graph ran unfused."""
    key = (graph, group, peer, reason)
    with _lock:
        _notes[key] += 1
        new = _notes[key] == 1
    if new:
        _log.warning("%s", Disagreement(*key))
