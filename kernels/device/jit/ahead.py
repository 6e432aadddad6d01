"""Programs compiled before the calls that need them, by threads in the background; and how many a process compiles.

NVRTC gives the GIL back while it compiles, and takes calls of several threads. A call that comes to a program on its
way waits for it, at the program's own lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

_log = logging.getLogger("weft.ops")
_MOST_THREADS = 4


class CompilableProgram(Protocol):
    """A program, or a Triton kernel with the types of its arguments."""

    def compile(self) -> None:
        """Compiles it, unless that is done. Needs no CUDA context."""


@dataclass(frozen=True)
class ProgramCounts:
    """Kernels' programs that this process has compiled or read.

    >>> from weft.fused_ops import FusionPass
    >>> FusionPass().report().programs.at_calls
    0

    Attributes:
        ahead: compiled in the background, before a call needed them.
        at_calls: compiled by the first call that needed them.
        kept: taken from the cache on disk.
        failed: could not be compiled in the background; the call that needs them tries again.
    """

    ahead: int = 0
    at_calls: int = 0
    kept: int = 0
    failed: int = 0

    def __sub__(self, before: ProgramCounts) -> ProgramCounts:
        return ProgramCounts(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


NO_PROGRAMS = ProgramCounts()
_counted = NO_PROGRAMS
_lock = threading.Lock()
_queue: deque[CompilableProgram] = deque()
_waiting: dict[CompilableProgram, list[Compilation]] = {}  # for those in the queue, and those being compiled
_threads = 0


class _Here(threading.local):
    in_background = False


_here = _Here()


def program_counts() -> ProgramCounts:
    """Of this process, so far."""
    return _counted


def count_program(*, kept: bool = False, failed: bool = False) -> None:
    """Counts a program that is there now, or could not be compiled."""
    global _counted
    ahead = not (kept or failed) and _here.in_background
    more = (ahead, not (kept or failed or ahead), kept, failed)
    with _lock:
        _counted = ProgramCounts(*(a + b for a, b in zip(astuple(_counted), more, strict=True)))


class Compilation:
    """Programs on their way.

    Attributes:
        count: how many.
    """

    def __init__(self, programs: Iterable[CompilableProgram]) -> None:
        wanted = list(dict.fromkeys(programs))
        self.count = self._left = len(wanted)
        self._done = threading.Condition()
        self._start(wanted)

    def wait(self, seconds: float) -> bool:
        """Whether all were compiled, or could not be, within so many seconds."""
        with self._done:
            return self._done.wait_for(lambda: self._left == 0, seconds)

    def _start(self, wanted: list[CompilableProgram]) -> None:
        global _threads
        with _lock:
            for program in wanted:
                if program not in _waiting:
                    _queue.append(program)
                _waiting.setdefault(program, []).append(self)
            more = min(_most_threads() - _threads, len(_queue))
            _threads += max(more, 0)
        for _ in range(more):
            threading.Thread(target=_work, name="weft-compiles").start()

    def _finished(self) -> None:
        with self._done:
            self._left -= 1
            self._done.notify_all()


def _most_threads() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdigit() else 1, 1)
    return max(1, min(_MOST_THREADS, share))


def _work() -> None:
    """Until the queue is empty, or the process ends: then what is left is not compiled."""
    global _threads
    _here.in_background = True
    while True:
        with _lock:
            if not _queue or not threading.main_thread().is_alive():
                _threads -= 1
                return
            program = _queue.popleft()
        begin = time.perf_counter()
        try:
            program.compile()
            _log.debug("%s: %.2f s ahead of its first call", program, time.perf_counter() - begin)
        except Exception as e:
            count_program(failed=True)
            _log.warning(
                "%s could not be compiled ahead of its first call, which tries again: %s", program, e
            )
        finally:
            with _lock:
                ended = _waiting.pop(program)
            for each in ended:
                each._finished()
