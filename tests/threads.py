"""Threads of this process."""

from __future__ import annotations

import os
import time


def staying_threads(seconds: float = 0.2) -> int:
    """The threads that are there now and so many seconds later. One that was joined is listed until it has left."""
    before = set(os.listdir("/proc/self/task"))
    time.sleep(seconds)
    return len(before.intersection(os.listdir("/proc/self/task")))
