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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from weft.symm_mem.workspace import HostEpoch

#: What happens: a rank comes late, is stopped (SIGSTOP) and goes on later, is killed (SIGKILL), leaves a call out,
#: calls with another argument than the others, has an exception inside the call, or forks a child that makes calls.
KINDS = ("delay", "stop", "kill", "skip", "corrupt", "raise", "fork")

#: Where in a call of a CPU rank: the method of an epoch after or before which it comes.
POINTS: dict[str, str | None] = {"before the call": None, "after a push": "post", "before the end": "leave"}


class Injected(Exception):
    """The exception of a "raise"."""


@dataclass(frozen=True)
class Gate:
    """A file in which ranks say that they have seen a fault. It is open once ``ranks`` of them have."""

    path: str
    ranks: int

    def seen(self) -> None:
        with open(self.path, "ab") as f:
            f.write(b".")

    def is_open(self) -> bool:
        return os.path.exists(self.path) and os.path.getsize(self.path) >= self.ranks


@dataclass(frozen=True)
class Fault:
    """``kind`` of KINDS at ``point`` of POINTS, on ``rank``, in call ``step``.

    ``seconds``: how long a "delay" or "stop" is, at most. With a ``gate`` it is over once that is open.
    """

    kind: str
    rank: int
    step: int
    seconds: float = 1.0
    point: str = "before the call"
    gate: Gate | None = None

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
        real, left = getattr(HostEpoch, method), [self._happen]

        def struck(use: HostEpoch, *args: Any) -> None:
            if method == "post":
                real(use, *args)
            if left:
                left.pop()()
            if method != "post":
                real(use, *args)

        with mock.patch.object(HostEpoch, method, struck):
            yield True

    def _happen(self) -> None:
        if self.kind == "delay":
            self._last()
        elif self.kind == "stop":
            stop(self._last)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise Injected("injected")

    def _last(self) -> None:
        end = time.monotonic() + self.seconds
        while (left := end - time.monotonic()) > 0 and not (self.gate and self.gate.is_open()):
            time.sleep(min(left, 0.005) if self.gate else left)


def stop(last: Callable[[], None]) -> None:
    """Stop this process, all its threads, as a debugger or a scheduler does. It goes on when ``last`` is over."""
    me = os.getpid()
    child = os.fork()
    if child == 0:
        last()
        while os.getppid() == me:  # which may come to its stop later than this
            os.kill(me, signal.SIGCONT)
            time.sleep(0.01)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
