"""Faults on purpose: on a chosen rank, at a chosen step of a program, before a call or at a point inside it.

fault = Fault("kill", rank=1, step=3, point="after a push")
for step in range(5):
    with fault.at(rank, step):
        ...  # the call
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from weft.symm_mem.workspace import HostUse

#: What happens: a rank comes late, is stopped (SIGSTOP) and goes on later, is killed (SIGKILL), leaves a call out,
#: calls with another argument than the others, or has an exception inside the call.
KINDS = ("delay", "stop", "kill", "skip", "corrupt", "raise")

#: Where in a call of a CPU rank, with the method of a use that it is behind or in front of.
POINTS = {"before the call": None, "after a push": "post", "before the end": "leave"}


class Injected(Exception):
    """The exception of a "raise"."""


@dataclass(frozen=True)
class Fault:
    """``kind`` of KINDS at ``point`` of POINTS, on ``rank``, in call ``step``; ``seconds`` for "delay" and "stop"."""

    kind: str
    rank: int
    step: int
    seconds: float = 1.0
    point: str = "before the call"

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.point not in POINTS:
            raise ValueError(f"{self.kind!r} {self.point!r}: must be of {KINDS} and {tuple(POINTS)}")

    def strikes(self, rank: int, step: int) -> bool:
        return (rank, step) == (self.rank, self.step)

    @contextmanager
    def at(self, rank: int, step: int) -> Iterator[bool]:
        """Around a call: whether it shall be left out ("skip") or changed ("corrupt"); the rest happens here."""
        if not self.strikes(rank, step):
            yield False
            return
        method = POINTS[self.point]
        if method is None:
            self._happen()
            yield True
            return
        real = getattr(HostUse, method)

        def struck(use: HostUse, *args: Any) -> None:
            if method == "post":
                real(use, *args)
            self._happen()
            if method != "post":
                real(use, *args)

        with mock.patch.object(HostUse, method, struck):
            yield True

    def _happen(self) -> None:
        if self.kind == "delay":
            time.sleep(self.seconds)
        elif self.kind == "stop":
            stop(self.seconds)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise Injected("injected")


def stop(seconds: float) -> None:
    """Stop this process, all its threads, as a debugger or a scheduler does, and let it go on later."""
    me = os.getpid()
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)
    os.waitpid(child, 0)
