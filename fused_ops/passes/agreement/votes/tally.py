"""Graphs that have run fused without a vote, counted by whoever runs them."""

from __future__ import annotations

import threading


class Tally:
    """Of one group, by one thread at a time, so that counting takes no lock."""

    __slots__ = ("ahead", "count", "seconds")

    def __init__(self) -> None:
        self.count, self.seconds, self.ahead = 0, 0.0, 0
        with _lock:
            _all.append(self)

    def add(self, seconds: float, ahead: bool) -> None:
        self.count += 1
        self.seconds += seconds
        self.ahead += ahead


_lock = threading.Lock()
_all: list[Tally] = []  # kept for good: what a destroyed group has counted stays counted


def tallies() -> list[Tally]:
    """Of all groups that there have been in this process."""
    with _lock:
        return list(_all)
