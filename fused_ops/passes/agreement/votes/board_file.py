"""The memory of a vote board: made by one rank, which offers it, and found by the others through the group's store.

It travels as the heap's memory does (``fd_exchange``), so it reaches as far: also into a container with another
hostname or PID namespace. Each rank has an open file description of its own, which holds the rank's locks. One of them
shows that the rank is there. The kernel drops it with the rank's process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Iterator
from io import FileIO
from typing import Any

from .....symm_mem import WeftError
from .....symm_mem.backends.host import host_identity, refuse_hosts
from .....symm_mem.bootstrap.fd_exchange import Offer, take
from .vote_rows import _PRESENT, _ROW, row_of

_IN_TIME = 5.0  # seconds in which a rank hands over the board, unless it is stopped
_YIELDING = 2e-3  # seconds of a wait in which the core is offered


class BoardFile:
    """One rank's part of it.

    Attributes:
        words: the memory, once it is there.
        fd: this rank's file description, -1 while there is none.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._bytes = rank, 8 * (row_of(0) + size * _ROW)
        self.words: memoryview | None = None
        self.fd = -1
        self._close: weakref.finalize[..., BoardFile] | None = None
        self._offer: Offer | None = None
        self._offered: dict[str, Any] = {}

    def offer(self) -> dict[str, Any]:
        """Makes the memory, unless an exception has ended that before; where the others find it."""
        if self._offer is None:
            secret = secrets.token_bytes(32)
            self._hold(os.memfd_create("weft-agree", os.MFD_CLOEXEC))
            os.ftruncate(self.fd, self._bytes)
            self._mapped()[:4] = memoryview(secret).cast("Q")
            where = {"host": host_identity(), "rank": self._rank, "secret": secret.hex()}
            self._offer = Offer([self.fd], secret.hex(), lasting=True)
            self._offered = {**where, "socket": self._offer.name}
        return self._offered

    def find(self, where: dict[str, Any]) -> str | None:
        """Take what a rank has made. Returns why that can never be; None also if it can be later (``words``)."""
        if where["socket"] != self._offered.get("socket"):
            maker = where["rank"]
            hosts = [where["host"]] * (1 + max(maker, self._rank))
            try:
                hosts[self._rank] = host_identity()
            except OSError:  # nothing can be seen from here
                return f"rank {self._rank} cannot read /proc"
            if (reason := refuse_hosts(hosts)) is not None:
                return reason
            self.close()
            try:
                self._hold(take(f"rank {maker}", where["socket"], where["secret"], _IN_TIME)[0])
                if os.fstat(self.fd).st_size != self._bytes:
                    raise WeftError(f"rank {maker} offers something else")
                if self._mapped()[:4].tobytes().hex() != where["secret"]:
                    raise WeftError(f"rank {maker} offers another group's")
            except TimeoutError:
                return None
            except (OSError, WeftError) as e:
                self.close()
                return str(e)
        words = self._mapped()
        # That this rank is there, which outlives nothing of its process.
        words[row_of(self._rank) + _PRESENT] = show_presence(self.fd, self._rank)
        self.words = words
        return None

    def has_ended(self, rank: int) -> bool:
        """Whether another rank was there and is no more."""
        if self.words is None or not self.words[row_of(rank) + _PRESENT]:
            return False
        return not is_present(self.fd, rank)

    def close(self) -> None:
        """The file, which a forked child must not keep either. What is mapped stays."""
        if self._offer is not None:
            self._offer.close()
            self._offer = None
        if self._close is not None:
            self._close()

    def _hold(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False

    def _mapped(self) -> memoryview:
        # By another description: Python's mapping keeps a file open, in a forked child, too, and would keep the locks.
        with FileIO(f"/proc/self/fd/{self.fd}", "r+") as file:
            return memoryview(mmap.mmap(file.fileno(), self._bytes)).cast("Q")


def lock(fd: int, seconds: float) -> bool:
    """Whether the caller has the lock, until ``unlock``; False after so many seconds."""
    begin, waits = 0.0, None
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if waits is None:
                begin, waits = time.monotonic(), backoff()
            if time.monotonic() - begin > seconds:
                return False
            next(waits)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def backoff() -> Iterator[bool]:
    """Each step lets others run for a moment; now and then it yields True: time to look further.

    At first the core is offered: the others usually come within microseconds, and the shortest sleep takes more than
    50. Then each sleep is short compared with what has been waited.
    """
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < _YIELDING:
        os.sched_yield()
        yield False
    while True:
        for _ in range(20):
            time.sleep(min(waited / 16, 1e-3))
            yield False
            waited = time.monotonic() - begin
        yield True


def show_presence(fd: int, rank: int) -> bool:
    """Have the others see that ``rank`` is there, for as long as its file description is; whether that can be done. Its
    byte of the file is locked, which lies after the end if need be."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, rank))
    except OSError:
        return False
    return True


def is_present(fd: int, rank: int) -> bool:
    """Whether another rank, which has shown its presence, is still there."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, rank))
    except OSError:
        return True
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


def _byte(kind: int, offset: int) -> bytes:
    """``struct flock`` of one byte."""
    return struct.pack("hhqqi0q", kind, 0, offset, 1, 0)
