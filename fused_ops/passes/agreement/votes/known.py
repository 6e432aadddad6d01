"""Graphs that a rank runs without asking the others, as all ranks know them: docs/protocol.md#votes-of-graphs.

Of such a rank and one that posts at the same moment at least one sees the other: each writes first and reads then, with
a full fence between.
"""

from __future__ import annotations

import threading

from ....dispatch.plan import unfused_calls
from .board_file import BoardFile
from .vote_rows import _ANSWER, _RUN, FUSED, is_free, ring_of, row_of

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
            if not is_free(words, self._others, turn, graph):
                return False
            at, before = self._own + ring, words[self._own + _ANSWER]
            words[at], words[at + 1], words[at + 2] = graph
            words[self._own + _ANSWER] = FUSED
            words[self._own + _RUN] = turn + 1
            with _fence:
                free = is_free(words, self._others, turn, graph)
            if free:
                self._ran = signature, unfused_calls()
            else:
                words[self._own + _RUN], words[self._own + _ANSWER] = turn, before
            return free
