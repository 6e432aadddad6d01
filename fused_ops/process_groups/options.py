"""Deadlines as process groups have them."""

from __future__ import annotations

from datetime import timedelta

from ...symm_mem.timeouts import LONGEST, set_timeout


def seconds_of(timeout: timedelta | None) -> float | None:
    """A deadline that a call or a wait was given; None if it was given none, as torch says that: unset, or 0."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return min(timeout.total_seconds(), LONGEST)


def seconds_of_milliseconds(timeout: int) -> float | None:
    """Likewise, of a call in the dispatcher."""
    return min(timeout / 1000, LONGEST) if timeout > 0 else None


def set_group_timeout(timeout: timedelta, group_name: str) -> None:
    """What a group's waits have as their deadline from now on."""
    if (seconds := seconds_of(timeout)) is not None:
        set_timeout(seconds, group_name)
