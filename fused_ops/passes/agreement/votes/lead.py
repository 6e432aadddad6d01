"""What a rank runs ahead of the others without the board's lock.

Once ranks may run ahead, a rank that comes to the graph it foresees writes that graph and its turn into its own row,
and looks at the others' rows. If none of them waits, has run something else or has been told to run unfused, it goes
on. Otherwise it takes the turn back and asks under the lock, as without foresight (``board``).

A rank that waits under the lock looks at the others' turns for as long as it waits. So of a rank that runs and one that
posts at the same moment at least one sees the other: each writes first and reads then, with a full fence between.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ....dispatch.plan import unfused_calls
from .board_file import BoardFile
from .foresight import Foresight, Step
from .tally import Tally
from .vote import AHEAD, FUSED, NOTHING, Answer, Vote
from .vote_rows import _AHEAD, _ANSWER, _RUN, ring_of, row_of, too_far

_fence = threading.Lock()  # taking it is a full fence: what was written is seen before what follows is read


class Coming(NamedTuple):
    """The graph that a rank has come to.

    Attributes:
        post: what it asks.
        step: what ``Foresight`` knows it by.
        unfused: as in ``Foresight``.
        now: when it came.
        foreseen: it comes next, and may run before all ranks have come to it.
    """

    post: Vote
    step: Step
    unfused: int
    now: float
    foreseen: bool


class Lead:
    """One rank's.

    Attributes:
        foresight: of the graphs that have run fused.
    """

    def __init__(self, rank: int, size: int, file: BoardFile, lock: threading.Lock) -> None:
        """``file``: has the board's words. ``lock``: for the threads of this rank."""
        self.foresight = Foresight()
        self._file, self._lock = file, lock
        self._own = row_of(rank)
        self._others = [row_of(r) for r in range(size) if r != rank]
        self._learns = False  # a graph has asked that may run ahead
        self._begun = 0  # before the last graph that ran fused
        self._until = 0  # the turn before which this rank may run without the lock
        self._tally = Tally()
        self._answers = Answer(True, NOTHING, rank), Answer(True, AHEAD, rank)

    def came(self, post: Vote) -> Coming | None:
        """To be asked before this rank waits for others; until ``answered`` it runs nothing without the lock.

        None where no graph has asked yet that may run ahead: then nothing is learned.
        """
        self.stop()
        self._learns = self._learns or post.leads
        if not self._learns:
            return None
        step, unfused = (post.signature, post.count, post.begun - self._begun), unfused_calls()
        foreseen = post.leads and self.foresight.expects(step, unfused)
        return Coming(post, step, unfused, time.perf_counter(), foreseen)

    def answered(self, coming: Coming, answer: Answer) -> None:
        """From now on this rank may run without the lock, as far as ranks may run ahead by now."""
        if answer.fused:
            self._begun = coming.post.begun
            self.foresight.ran(coming.step, coming.unfused, coming.now, ahead=answer.why == AHEAD)
        if (words := self._file.words) is not None:
            self._until = too_far(words, self._others)

    def stop(self) -> None:
        """This rank runs nothing without the lock any more."""
        self._until = 0

    def run(self, signature: int, count: int, begun: int, needs: int) -> Answer | None:
        """FUSED, if this rank runs the graph of such a ``Vote`` without the board's lock; None: it must ask.

        Python's caches are cold in front of a graph: the less code, the better.
        """
        words, now = self._file.words, time.perf_counter()
        if words is None:
            return None
        with self._lock:
            turn = words[self._own + _RUN]
            if turn >= self._until:
                return None
            step, unfused = (signature, count, begun - self._begun), unfused_calls()
            if not self.foresight.expects(step, unfused):
                return None
            ring, graph = ring_of(turn), (begun, count, signature)
            if self._finds(words, turn, ring, graph, needs) is None:
                return None
            at = self._own + ring
            words[at], words[at + 1], words[at + 2] = graph
            words[self._own + _ANSWER] = FUSED
            words[self._own + _RUN] = turn + 1
            with _fence:
                ahead = self._finds(words, turn, ring, graph, needs)
            if ahead is None:
                words[self._own + _RUN] = turn
                return None
            self._begun = begun
            self.foresight.ran(step, unfused, now, ahead=ahead)
            self._tally.add(self.foresight.last - now, ahead)
            return self._answers[ahead]

    def _finds(
        self, words: memoryview, turn: int, ring: int, graph: tuple[int, int, int], needs: int
    ) -> bool | None:
        """Whether another rank has yet to come to this turn. None if one waits or wants to, was told to run unfused
        or has run another graph in this turn."""
        ahead = False
        for row in self._others:
            if words[row + _ANSWER] != FUSED or words[row + _AHEAD] < needs:
                return None
            if words[row + _RUN] <= turn:
                ahead = True
            elif tuple(words[row + ring : row + ring + 3]) != graph:
                return None
        return ahead
