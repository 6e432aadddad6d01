"""A lock that processes have on a file they all have open. The kernel gives it back once no process has the holder's
file open."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def locked(fd: int, timeout: Callable[[], float]) -> Iterator[float | None]:
    """The body has the lock if it is given None; else it is given the seconds that were waited in vain."""
    begin, seconds, waits = time.monotonic(), -1.0, pauses()
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
                time.sleep(next(waits) or 0.0)
        yield waited
    finally:  # also where Ctrl-C came just behind it; who does not have it gives nothing back
        fcntl.flock(fd, fcntl.LOCK_UN)


def pauses() -> Iterator[float | None]:
    """Short at first: the others usually come within microseconds. Now and then None: time to look further."""
    for _ in range(50):
        yield 0.0
    pause = 2e-5
    while True:
        for _ in range(20):
            yield pause
            pause = min(2 * pause, 1e-3)
        yield None
