"""A CPU rank waits for a word that another rank writes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..bootstrap import processes
from ..errors import PeerWait, WaitOutcome

_SPINS = 200  # tries before a waiting CPU rank offers its core to the others
_YIELDING = 0.01  # seconds in which a wait only offers its core: after that something holds the other rank up
_NAP = 0.001  # seconds that it sleeps between two looks from then on
_LOOK = 0.05  # seconds between two looks whether the awaited rank's process is still there


def reached(seen: int, expected: int) -> bool:
    """Whether a 32-bit counter has come to ``expected``, also once it has wrapped around."""
    return (seen - expected) & 0xFFFFFFFF < 0x80000000


@dataclass(frozen=True, slots=True)
class PeerLiveness:
    """How a wait learns that the rank that it waits for will not come, and what it says until then.

    Attributes:
        process: that rank's; once it has ended nobody waits for it.
        abort_notice: address of the word in which that rank says that it takes no further part: 1 + whom it blames.
        about: the wait after so many seconds, for a warning of a rank that is late.
    """

    process: dict[str, Any] | None
    abort_notice: int | None
    about: Callable[[float], PeerWait] | None = None


def spin(
    address: int,
    expected: int,
    timeout: float,
    peer: PeerLiveness,
    give_up: Callable[[], None] | None = None,
    *,
    exactly: bool = False,
) -> WaitOutcome | None:
    """Wait until the word at a CPU address has reached ``expected``.

    Args:
        timeout: seconds.
        peer: the rank that writes the word.
        give_up: called now and then; what it raises ends the wait.
        exactly: it is waited for itself: the word cannot be past it, and may be as old as one that is.

    Returns:
        None; or what was seen last, where the deadline has passed, or the writer has ended or posted an abort notice.
    """
    word = ctypes.c_uint32.from_address(address)
    begin = look = 0.0
    notice = None if peer.abort_notice is None else ctypes.c_uint32.from_address(peer.abort_notice)
    ended, blames, warned = False, 0, peer.about is None
    there = int.__eq__ if exactly else reached
    while True:
        for _ in range(_SPINS):
            if there(word.value, expected):
                return None
        now = time.monotonic()
        if ended or blames:
            return WaitOutcome(word.value, now - begin, ended, None if ended else blames - 1)
        if give_up is not None:
            give_up()
        if not begin:
            begin, look = now, now + _LOOK
        elif now - begin > timeout:
            return WaitOutcome(word.value, timeout)
        # The peer may have written the word just before it went: look at that once more.
        elif notice is not None and notice.value:
            blames = notice.value
        elif now > look:
            ended = processes.has_ended(peer.process)
            look = now + _LOOK
        if not warned and now - begin > errors.SILENT:
            assert peer.about is not None
            errors.name_late_rank(peer.about(now - begin), now - begin)
            warned = True
        if now - begin < _YIELDING:
            os.sched_yield()
        else:
            time.sleep(_NAP)
