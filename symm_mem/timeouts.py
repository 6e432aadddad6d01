"""How long a rank waits for another one."""

from __future__ import annotations

import os

from .groups import Group, group_name

_per_group: dict[str, float] = {}


def default_timeout() -> float:
    """Seconds where ``set_timeout`` said nothing: WEFT_TIMEOUT, else 300."""
    text = os.environ.get("WEFT_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"WEFT_TIMEOUT: is {text!r}, must be a number of seconds above 0")
    return seconds


def get_timeout(group: Group = None) -> float:
    """Seconds a wait inside ``group`` may take: what ``set_timeout`` said, else WEFT_TIMEOUT, else 300."""
    if _per_group and (found := _per_group.get(group_name(group))) is not None:
        return found
    return default_timeout()


def chosen_timeout(group: str) -> float | None:
    """What ``set_timeout`` said for the group of this name; None if it said nothing."""
    return _per_group.get(group)


def set_timeout(seconds: float, group: Group = None) -> None:
    """Set the deadline of every wait inside ``group``, in seconds. A captured graph keeps the old one.

    Raises:
        ValueError: ``seconds`` is not above 0.
    """
    if not seconds > 0:
        raise ValueError(f"seconds: is {seconds!r}, must be above 0")
    _per_group[group_name(group)] = float(seconds)
