"""Locks that processes have on a file they all have open. The kernel gives them back once no process has the holder's
file description open: so they also tell that a process is gone, in whatever PID namespace it was."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_YIELDING = 2e-3  # seconds


@contextmanager
def locked(fd: int, timeout: Callable[[], float]) -> Iterator[float | None]:
    """The body has the lock if it is given None; else it is given the seconds that were waited in vain."""
    begin, seconds, waits = time.monotonic(), -1.0, turns_of_wait()
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                waited = None
                break
            except BlockingIOError:
                if seconds < 0:
                    seconds = timeout()
                if time.monotonic() - begin > seconds:
                    waited = seconds
                    break
                next(waits)
        yield waited
    finally:  # also where Ctrl-C came just behind it; who does not have it gives nothing back
        fcntl.flock(fd, fcntl.LOCK_UN)


def turns_of_wait() -> Iterator[bool]:
    """Each turn lets others run for a moment; now and then it yields True: time to look further.

    At first the core is offered: the others usually come within microseconds, and a sleep takes 60 at least, or 300,
    whatever its argument. Then each sleep is short beside what has been waited.
    """
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < _YIELDING:
        os.sched_yield()
        yield False
    while True:
        for _ in range(20):
            time.sleep(min(waited / 16, 1e-3))
            yield False
            waited = time.monotonic() - begin
        yield True


def show_presence(fd: int, rank: int) -> bool:
    """Have the others see that ``rank`` is there, for as long as its file description is; whether that can be done.

    Its byte of the file is locked, which lies behind the end if need be.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, rank))
    except OSError:
        return False
    return True


def is_present(fd: int, rank: int) -> bool:
    """Whether another rank, which has shown its presence, is still there."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, rank))
    except OSError:
        return True
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


def _byte(kind: int, offset: int) -> bytes:
    """``struct flock`` of one byte."""
    return struct.pack("hhqqi0q", kind, 0, offset, 1, 0)
