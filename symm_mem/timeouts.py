"""The deadlines of waits on other ranks, and on other threads of this one.

Whoever has a ``ThreadLock`` waits for other ranks meanwhile, each wait with its deadline. So a thread that waits for
the lock waits for as long as its holder goes on, and gives up on one that does not: its error names both threads.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import NamedTuple

from torch.distributed import ProcessGroup

from .call_cache import CachedDict
from .call_site import calling, site_from, text
from .errors import WeftError
from .groups import Group, group_name, group_of_name

LONGEST = 1e9  # seconds; kernels count nanoseconds in 64 bits
_PREPARING = 1800.0
GRACE = 30.0  #: seconds after the deadline of a thread's wait in which another one of the rank waits for that thread
_LOOK = 1.0  # seconds between two looks whether the holder goes on


class _Chosen(NamedTuple):
    """What ``set_timeout`` said for a group's name, and of which group; None: there was none by this name yet."""

    seconds: float
    group: weakref.ref[ProcessGroup] | None


_per_group: CachedDict[str, _Chosen] = CachedDict()


class _ThisCall(threading.local):
    seconds: float | None = (
        None  #: the deadline of the call that this thread is making, if it has one of its own
    )


_this_call = _ThisCall()


@contextmanager
def call_timeout(seconds: float | None) -> Iterator[None]:
    """What this thread waits for inside the body, it waits for so long; None: as long as the group says."""
    before, _this_call.seconds = _this_call.seconds, seconds
    try:
        yield
    finally:
        _this_call.seconds = before


def default_timeout() -> float:
    """Seconds where ``set_timeout`` said nothing: WEFT_TIMEOUT, else 300."""
    text = os.environ.get("WEFT_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= LONGEST:
        raise ValueError(
            f"WEFT_TIMEOUT: is {text!r}, must be a number of seconds above 0, at most {LONGEST:g}"
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
    if _this_call.seconds is not None:
        return _this_call.seconds
    if _per_group and (found := chosen_timeout(group_name(group))) is not None:
        return found
    return default_timeout()


def timeout_in_ns(group: Group = None) -> int:
    """``get_timeout`` in nanoseconds, as kernels count."""
    return int(get_timeout(group) * 1e9)


def chosen_timeout(group: str) -> float | None:
    """What ``set_timeout`` said for the group of this name; None if it said nothing, or of one that is destroyed."""
    chosen = _per_group.get(group)
    if chosen is None:
        return None
    now = group_of_name(group)
    if chosen.group is None:
        if now is not None:  # it was said before the group was made
            _per_group[group] = chosen._replace(group=weakref.ref(now))
    elif chosen.group() is not now or now is None:
        if _per_group.get(group) is chosen:
            _per_group.pop(group, None)
        return None
    return chosen.seconds


def preparing_timeout(group: Group = None) -> float:
    """Seconds that ranks wait for one that is still compiling: half an hour, or the deadline if that is longer."""
    return max(get_timeout(group), _PREPARING)


def set_timeout(seconds: float, group: Group = None) -> None:
    """Set the deadline of every wait inside ``group``, in seconds. A captured graph keeps the old one.

    >>> from weft import symm_mem
    >>> symm_mem.set_timeout(60)
    >>> symm_mem.get_timeout()
    60.0

    It holds until the group is destroyed: another group that is later given its name has the default again. The name
    may be that of a group yet to be made.
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
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"seconds: is {seconds!r}, must be above 0 and at most {LONGEST:g}")
    name = group_name(group)
    now = group_of_name(name)
    _per_group[name] = _Chosen(float(seconds), None if now is None else weakref.ref(now))


class ThreadLock:
    """A reentrant lock whose holder is known.

    Args:
        what: it is of, for errors.
        longest: seconds that one wait of the holder may take.

    Attributes:
        since: when the holder has got it, or has last begun a wait for another rank.
    """

    def __init__(self, what: str, longest: Callable[[], float]) -> None:
        self._what, self._longest = what, longest
        self._lock = threading.RLock()
        self._holder: tuple[int, str | None] = (0, None)  # its thread, and the op that it calls
        self.since = 0.0

    def __enter__(self) -> ThreadLock:
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._got()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, timeout: float = -1) -> bool:
        """Whether it was got within so many seconds."""
        got = self._lock.acquire(timeout=timeout)
        if got:
            self._got()
        return got

    def release(self) -> None:
        self._lock.release()

    def goes_on(self) -> None:
        """The holder begins a wait for another rank."""
        self.since = time.monotonic()

    def _got(self) -> None:
        self._holder, self.since = (threading.get_ident(), calling.op), time.monotonic()

    def _wait(self) -> None:
        limit = self._longest() + GRACE
        while not self._lock.acquire(timeout=min(_LOOK, limit)):
            waited = time.monotonic() - self.since
            if waited > limit:
                thread, op = self._holder
                called = f"is in {op}" if op else "has it"
                raise WeftError(
                    f"{calling.op or 'a call'}: {thread_name(threading.get_ident())} waited for {self._what}: "
                    f"{thread_name(thread)} of this rank {called}{_now_at(thread)} and has not gone on for "
                    f"{waited:.0f} s"
                )


def thread_name(number: int | None) -> str:
    """A thread as errors name it; it may have ended."""
    names = (thread.name for thread in threading.enumerate() if thread.ident == number)
    return f"thread {next(names, number)!r}"


def _now_at(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    site = text(site_from(frame)) if frame is not None else None
    return f" (at {site})" if site else ""
