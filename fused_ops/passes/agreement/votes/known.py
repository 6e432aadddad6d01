"""Graphs that a rank runs without asking the others, as all ranks know them: docs/protocol.md#votes-of-graphs.

Of such a rank and one that posts at the same moment at least one sees the other: each writes first and reads then, with
a full fence between.
"""

from __future__ import annotations

import threading

from ....dispatch.plan import unfused_calls
from .board_file import BoardFile
from .vote import FUSED, PLAIN, UNDECIDED
from .vote_rows import _ANSWER, _BEGUN, _COUNT, _RUN, _TURN, FARTHEST, ring_of, row_of, trusted

_fence = threading.Lock()  # taking it is a full fence: what was written is seen before what follows is read
_MOST_KNOWN = 1 << 16


class KnownGraphs:
    """One rank's, of one group."""

    def __init__(self, rank: int, size: int, file: BoardFile, lock: threading.Lock) -> None:
        """``file``: has the board's words. ``lock``: for the threads of this rank."""
        self._file, self._lock = file, lock
        self._own = row_of(rank)
        self._others = [row_of(r) for r in range(size) if r != rank]
        self._known: set[int] = set()
        # Signature of the last run, and the calls that had run unfused before it.
        self._ran: tuple[int, int] | None = None

    def learn(self, signature: int) -> None:
        """This rank is about to run a graph on which all agreed."""
        with self._lock:
            self._end_run()
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._ran = signature, unfused_calls()

    def forget(self) -> None:
        self._known, self._ran = set(), None

    def _end_run(self) -> None:
        """The graph that ran last is known if all its calls went over the heap. What goes over the backend meets
        whatever another rank has there, so the ranks are asked each time."""
        if self._ran is not None:
            signature, unfused = self._ran
            (self._known.add if unfused == unfused_calls() else self._known.discard)(signature)
            self._ran = None

    def run(self, signature: int, count: int, begun: int) -> bool:
        """Whether this rank runs the graph of such a ``Vote`` without asking.

        Python's caches are cold before a graph: the less code, the better.
        """
        words = self._file.words
        if words is None:
            return False
        with self._lock:
            if self._ran is not None:
                self._end_run()
            if signature not in self._known:
                return False
            turn = words[self._own + _RUN]
            ring, graph = ring_of(turn), (begun, count, signature)
            if not self._is_free(words, turn, ring, graph):
                return False
            at, before = self._own + ring, words[self._own + _ANSWER]
            words[at], words[at + 1], words[at + 2] = graph
            words[self._own + _ANSWER] = FUSED
            words[self._own + _RUN] = turn + 1
            with _fence:
                free = self._is_free(words, turn, ring, graph)
            if free:
                self._ran = signature, unfused_calls()
            else:
                words[self._own + _RUN], words[self._own + _ANSWER] = turn, before
            return free

    def _is_free(self, words: memoryview, turn: int, ring: int, graph: tuple[int, int, int]) -> bool:
        """Whether no rank waits, is too far behind, or has run, or is to run, something else in this turn."""
        if not trusted(words):
            return False
        for row in self._others:
            answer, run = words[row + _ANSWER], words[row + _RUN]
            if answer == UNDECIDED or run + FARTHEST <= turn:
                return False
            if run > turn:
                if tuple(words[row + ring : row + ring + 3]) != graph:
                    return False
            elif answer == PLAIN and words[row + _TURN] == turn and _end(words, row) > graph[0]:
                return False
        return True


def _end(words: memoryview, row: int) -> int:
    """The collectives that the backend has begun once those of the last post are done."""
    return words[row + _BEGUN] + words[row + _COUNT]
