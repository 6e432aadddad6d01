"""A CPU rank waits for a word that another rank writes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from ..bootstrap import processes

_SPINS = 200  # tries before a waiting CPU rank offers its core to the others
_LOOK = 0.05  # seconds between two looks whether the awaited rank's process is still there


def reached(seen: int, expected: int) -> bool:
    """Whether a 32-bit counter has come to ``expected``, also once it has wrapped around."""
    return (seen - expected) & 0xFFFFFFFF < 0x80000000


class Expired(Exception):
    """What ``spin`` saw last, at the deadline or earlier; callers make a PeerTimeout of it."""

    def __init__(self, seen: int, seconds: float, ended: bool = False, blames: int | None = None) -> None:
        super().__init__(seen, seconds, ended, blames)
        self.seen, self.seconds, self.ended, self.blames = seen, seconds, ended, blames


def spin(
    address: int,
    expected: int,
    timeout: float,
    process: dict[str, Any] | None = None,
    aborted: int | None = None,
    give_up: Callable[[], None] | None = None,
    *,
    exactly: bool = False,
) -> None:
    """Wait until the word at a CPU address has reached ``expected``.

    Args:
        timeout: seconds.
        exactly: compare for equality: the word cannot be past ``expected``, and may be very old.
        process: that of the rank that writes the word; once it has ended, so does the wait.
        aborted: address of that rank's abort notice: 1 + the rank it blames.
        give_up: called now and then; what it raises ends the wait.

    Raises:
        Expired: the deadline has passed, or the word is not there and its writer has ended or posted an abort notice.
    """
    word = ctypes.c_uint32.from_address(address)
    begin = look = 0.0
    abort_notice = None if aborted is None else ctypes.c_uint32.from_address(aborted)
    ended, blames = False, 0
    there = int.__eq__ if exactly else reached
    while True:
        for _ in range(_SPINS):
            if there(word.value, expected):
                return
        now = time.monotonic()
        if ended or blames:
            raise Expired(word.value, now - begin, ended, None if ended else blames - 1)
        if give_up is not None:
            give_up()
        if not begin:
            begin, look = now, now + _LOOK
        elif now - begin > timeout:
            raise Expired(word.value, timeout)
        # The peer may have written the word just before it went: look at that once more.
        elif abort_notice is not None and abort_notice.value:
            blames = abort_notice.value
        elif now > look:
            ended = processes.has_ended(process)
            look = now + _LOOK
        os.sched_yield()
