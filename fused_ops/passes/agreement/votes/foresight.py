"""Which graph comes next, as far as the sequence of a group's fused runs so far repeats itself.

A rank keeps this for itself. Ranks need not foresee the same: what one of them runs ahead of the others stands on the
board, and the others compare it with theirs.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, TypeAlias

# Signature, collectives in the graph, and those that the backend has begun since the fused run before.
Step: TypeAlias = tuple[int, int, int]

_KEPT = 2048
_COMPARED = 64
_TRIED = 64  # earlier places that are compared


class AheadLimits(NamedTuple):
    """When ranks run ahead of each other, and how far.

    Attributes:
        trusted: turns in which they must have met and agreed. Each time that they differ it takes twice as many.
        farthest: turns that a rank may be ahead of another one.
        likely: runs that must have been foreseen, or would have been.
        meeting: runs from one meeting to the next, at least.
    """

    trusted: int = 32
    farthest: int = 96
    likely: int = 8
    meeting: int = 64


LIMITS = AheadLimits()


class Foresight:
    """The fused runs of one group.

    Attributes:
        last: when the last one began, by ``time.perf_counter``; 0.0 before the first.
    """

    def __init__(self) -> None:
        # Of each run its step, the calls that had run unfused by then, and the pause of the host in front of it,
        # smoothed over the repetitions.
        self._runs: list[tuple[Step, int, float]] = []
        self._places: dict[Step, deque[int]] = {}  # of each step, of the first ``_indexed`` runs
        self._indexed = 0
        self._period = self._held = 0
        self._met = 0  # runs since all ranks were there at once
        self.last = 0.0

    def expects(self, step: Step, unfused: int) -> bool:
        """Whether this is what follows, over the heap alone, and no place where the ranks should meet.

        They meet where the host pauses longest, as between two steps of a training: what a rank does there alone does
        not keep the others waiting inside of an op.

        Args:
            unfused: calls of ops that have run unfused in this process. What goes over the backend meets whatever
                another rank has there.
        """
        if self._held < LIMITS.likely:
            return False
        runs, period = self._runs, self._period
        expected, before, pause = runs[-period]
        if expected != step or (runs[1 - period][1] if period > 1 else unfused) != before:
            return False
        return self._met + 1 < LIMITS.meeting or pause < max(run[2] for run in runs[-period:])

    def ran(self, step: Step, unfused: int, now: float, *, ahead: bool) -> None:
        """A fused run, ``ahead`` of other ranks or together with them, to which this rank came at the time ``now``."""
        self._met = self._met + 1 if ahead else 0
        runs, period = self._runs, self._period
        pause = now - self.last if self.last else 0.0
        held = period > 0 and runs[-period][0] == step
        if held:
            pause = (pause + runs[-period][2]) / 2
        runs.append((step, unfused, pause))
        if held:
            self._held = min(self._held + 1, _KEPT)
        else:
            self._find()
        if len(runs) >= 2 * _KEPT:
            del runs[:_KEPT]
            self._places, self._indexed = {}, 0
        self.last = time.perf_counter()

    def _find(self) -> None:
        """The earlier place whose past is longest the same as now."""
        runs, now = self._runs, len(self._runs) - 1
        self._period = self._held = 0
        for at in reversed(self._earlier_places(now)):
            if now - at >= _KEPT:  # so many are there at any time
                return
            length = 1
            while length < _COMPARED and length <= at and runs[at - length][0] == runs[now - length][0]:
                length += 1
            if length > self._held:
                self._period, self._held = now - at, length
            if length == _COMPARED:
                return

    def _earlier_places(self, now: int) -> list[int]:
        """Where the step was that stands ``now``, the last ``_TRIED`` times."""
        for at in range(self._indexed, now):
            self._places.setdefault(self._runs[at][0], deque(maxlen=_TRIED)).append(at)
        self._indexed = now
        return list(self._places.get(self._runs[now][0], ()))
