"""Programs compiled before the calls that need them, by threads in the background; and how many a process compiles.

NVRTC gives the GIL back while it compiles, and takes calls of several threads. A call that comes to a program on its
way waits for it, at the program's own lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

from ....symm_mem import forks
from ....symm_mem.errors import tell_progress

_log = logging.getLogger("weft.ops")
_MOST_THREADS = 4


class CompilableProgram(Protocol):
    """What is compiled here of a ``Program``."""

    def cubin(self) -> bytes:
        """Compiles it, unless that is done. Needs no CUDA context."""
        ...


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

    def __str__(self) -> str:
        failed = f", {self.failed} not compiled ahead" if self.failed else ""
        return f"{self.ahead} compiled ahead, {self.at_calls} at calls, {self.kept} from the cache{failed}"

    def __sub__(self, before: ProgramCounts) -> ProgramCounts:
        return ProgramCounts(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


NO_PROGRAMS = ProgramCounts()


class Compilation:
    """Programs on their way.

    Attributes:
        count: how many.
    """

    def __init__(self, programs: Iterable[CompilableProgram]) -> None:
        wanted = list(dict.fromkeys(programs))
        self.count = self._left = len(wanted)
        self._done = threading.Condition()
        _threads.take(wanted, self)

    def wait(self, seconds: float) -> bool:
        """Whether all were compiled, or could not be, within so many seconds."""
        with self._done:
            return self._done.wait_for(lambda: self._left == 0, seconds)

    def ends_one(self) -> None:
        with self._done:
            self._left -= 1
            self._done.notify_all()


class _Here(threading.local):
    in_background = False


_here = _Here()


class _Threads:
    """They compile what is in the queue, and end where it is empty."""

    def __init__(self) -> None:
        self.counted = NO_PROGRAMS
        self.forked()

    def forked(self) -> None:
        """A child has none of its parent's threads."""
        self.lock = threading.Lock()
        self._queue: deque[CompilableProgram] = deque()
        # For those in the queue, and those being compiled.
        self._waiting: dict[CompilableProgram, list[Compilation]] = {}
        self._running = 0

    def take(self, programs: Iterable[CompilableProgram], on_behalf: Compilation) -> None:
        with self.lock:
            for program in programs:
                if program not in self._waiting:
                    self._queue.append(program)
                self._waiting.setdefault(program, []).append(on_behalf)
            more = max(0, min(_most_threads() - self._running, len(self._queue)))
            self._running += more
        for started in range(more):
            try:
                threading.Thread(target=self._run, name="weft-compiles").start()
            except RuntimeError as e:  # no more threads, or the process ends
                self._give_up(more - started, e)
                return

    def _give_up(self, missing: int, why: Exception) -> None:
        """Threads could not be started. Where there is none, nothing is compiled ahead."""
        with self.lock:
            self._running -= missing
            left = [] if self._running else [*self._queue]
            for program in left:
                self._queue.remove(program)
        if left:
            _log.warning(
                "%d kernels are not compiled ahead of their first calls, which do it: %s", len(left), why
            )
        for program in left:
            self._ended(program)

    def _run(self) -> None:
        _here.in_background = True
        while True:
            with self.lock:
                if not self._queue or not threading.main_thread().is_alive():  # the process ends
                    self._running -= 1
                    return
                program = self._queue.popleft()
            try:
                program.cubin()
            except Exception as e:
                count_program(failed=True)
                _log.warning(
                    "%s could not be compiled ahead of its first call, which tries again: %s", program, e
                )
            finally:
                self._ended(program)

    def _ended(self, program: CompilableProgram) -> None:
        with self.lock:
            ended = self._waiting.pop(program)
        for each in ended:
            each.ends_one()


_threads = _Threads()
forks.tell(_threads)


def program_counts() -> ProgramCounts:
    """Of this process, so far."""
    return _threads.counted


def tell_of_compilation(what: object) -> None:
    """Before what takes seconds."""
    waiting = len(_threads._queue)
    tell_progress(_log, f"compiles {what}" + (f"; {waiting} more kernels wait" if waiting else ""))


def count_program(*, kept: bool = False, failed: bool = False) -> None:
    """Counts a program that is there now, or could not be compiled."""
    ahead = not (kept or failed) and _here.in_background
    more = (ahead, not (kept or failed or ahead), kept, failed)
    with _threads.lock:
        before = astuple(_threads.counted)
        _threads.counted = ProgramCounts(*(a + b for a, b in zip(before, more, strict=True)))


def _most_threads() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdigit() else 1, 1)
    return max(1, min(_MOST_THREADS, share))
