"""Locks that processes have on a file they all have open. The kernel gives them back once no process has the holder's
file description open: so they also tell that a process is gone, in whatever PID namespace it was."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator

_YIELDING = 2e-3  # seconds


def lock(fd: int, timeout: Callable[[], float]) -> float | None:
    """None: the caller has the lock, until ``unlock``; else the seconds that were waited in vain."""
    begin, seconds, waits = 0.0, 0.0, None
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if waits is None:
                begin, seconds, waits = time.monotonic(), timeout(), backoff()
            if time.monotonic() - begin > seconds:
                return seconds
            next(waits)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def backoff() -> Iterator[bool]:
    """Each step lets others run for a moment; now and then it yields True: time to look further.

    At first the core is offered: the others usually come within microseconds, and the shortest sleep takes more than
    50. Then each sleep is short compared with what has been waited.
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
    """Have the others see that ``rank`` is there, for as long as its file description is; whether that can be done. Its
    byte of the file is locked, which lies after the end if need be."""
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
