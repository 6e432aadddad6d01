"""The deadlines of waits on other ranks."""

from __future__ import annotations

import os
from numbers import Real

from .call_cache import CachedDict
from .groups import Group, group_name

_LONGEST = 1e9  # seconds; kernels count nanoseconds in 64 bits
_PREPARING = 1800.0

_per_group: CachedDict[str, float] = CachedDict()


def default_timeout() -> float:
    """Seconds where ``set_timeout`` said nothing: WEFT_TIMEOUT, else 300."""
    text = os.environ.get("WEFT_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(
            f"WEFT_TIMEOUT: is {text!r}, must be a number of seconds above 0, at most {_LONGEST:g}"
        )
    return seconds


def get_timeout(group: Group = None) -> float:
    """Seconds a wait inside ``group`` may take: what ``set_timeout`` said, else WEFT_TIMEOUT, else 300."""
    if _per_group and (found := _per_group.get(group_name(group))) is not None:
        return found
    return default_timeout()


def chosen_timeout(group: str) -> float | None:
    """What ``set_timeout`` said for the group of this name; None if it said nothing."""
    return _per_group.get(group)


def preparing_timeout(group: Group = None) -> float:
    """Seconds that ranks wait for one that is still compiling: half an hour, or the deadline if that is longer."""
    return max(get_timeout(group), _PREPARING)


def set_timeout(seconds: float, group: Group = None) -> None:
    """Set the deadline of every wait inside ``group``, in seconds. A captured graph keeps the old one.

    It is kept by the group's name. A name is not looked up: the group may be made later, or another one have it then.

    Raises:
        ValueError: ``seconds`` is not above 0, or above 1e9.
        TypeError: ``seconds`` is not a number.
    """
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise TypeError(f"seconds: is {seconds!r}, must be a number")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"seconds: is {seconds!r}, must be above 0 and at most {_LONGEST:g}")
    _per_group[group_name(group)] = float(seconds)
