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
    """Seconds a wait inside ``group`` may take: what ``set_timeout`` said, else WEFT_TIMEOUT, else 300.

    >>> from weft import symm_mem
    >>> symm_mem.set_timeout(60, "tensor")
    >>> symm_mem.get_timeout("tensor")
    60.0

    Args:
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Raises:
        ValueError: WEFT_TIMEOUT is no number of seconds above 0 and up to 1e9, or there is no such group.
        TypeError: ``group`` is no group.
    """
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

    >>> from weft import symm_mem
    >>> symm_mem.set_timeout(60)
    >>> symm_mem.get_timeout()
    60.0

    It is kept by the group's name. A name is not looked up: the group may be made later, or another one have it then.
    Ranks wait for one that is still compiling for half an hour, or for the deadline if that is longer.

    Args:
        seconds: above 0, at most 1e9.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Raises:
        ValueError: ``seconds`` is not above 0, or above 1e9, or there is no such group.
        TypeError: ``seconds`` is not a number, or ``group`` is no group.
    """
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise TypeError(f"seconds: is {seconds!r}, must be a number")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"seconds: is {seconds!r}, must be above 0 and at most {_LONGEST:g}")
    _per_group[group_name(group)] = float(seconds)
