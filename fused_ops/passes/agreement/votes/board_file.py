"""The memory of a vote board: made by rank 0, which offers it, and found by the others through the group's store.

It travels as the heap's memory does (``fd_exchange``), so it reaches as far: also into a container with another
hostname or PID namespace. Each rank has an open file description of its own, which holds the rank's locks. One of them
shows that the rank is there. The kernel drops it with the rank's process.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from io import FileIO
from typing import Any

from .....symm_mem import WeftError
from .....symm_mem.backends.host import host_identity, refuse_hosts
from .....symm_mem.bootstrap.fd_exchange import Offer, take
from .file_lock import is_present, show_presence
from .vote_rows import _HEADER, _PRESENT, _ROW

_IN_TIME = 5.0  # seconds in which rank 0 hands over the board, unless it is stopped


class BoardFile:
    """One rank's part of it.

    Attributes:
        words: the memory, once it is there.
        fd: this rank's file description, -1 while there is none.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._bytes = rank, 8 * (_HEADER + size * _ROW)
        self.words: memoryview | None = None
        self.fd = -1
        self._close: weakref.finalize[..., BoardFile] | None = None
        self._offer: Offer | None = None

    def make(self) -> dict[str, Any]:
        """Where the others find it; once more where an exception has ended it. ``words`` are set by ``show``."""
        if self._close is None:
            self._hold(os.memfd_create("weft-agree", os.MFD_CLOEXEC))
        os.ftruncate(self.fd, self._bytes)
        words = self._mapped()
        if not any(words[:4]):
            words[:4] = memoryview(secrets.token_bytes(32)).cast("Q")
        secret = words[:4].tobytes().hex()
        if self._offer is None:
            self._offer = Offer(self.fd, secret)
        return {"host": _host(), "socket": self._offer.name, "secret": secret}

    def find(self, where: dict[str, Any]) -> str | None:
        """Take what rank 0 has made. Returns why that can never be; None also if it can be later (``words``)."""
        hosts = [where["host"]] * self._rank + [_host()]
        if None in hosts:
            return f"rank {hosts.index(None)} cannot read /proc"
        if (reason := refuse_hosts(hosts)) is not None:
            return reason
        try:
            self._hold(take("rank 0", where["socket"], where["secret"], _IN_TIME))
            if os.fstat(self.fd).st_size != self._bytes:
                raise WeftError("rank 0 offers something else")
            if self._mapped()[:4].tobytes().hex() != where["secret"]:
                raise WeftError("rank 0 offers another group's")
        except TimeoutError:
            return None
        except (OSError, WeftError) as e:
            self.close()
            return str(e)
        self.show()
        return None

    def show(self) -> None:
        """The words, from now on, and that this rank is there, which outlives nothing of its process."""
        words = self._mapped()
        if show_presence(self.fd, self._rank):
            words[_HEADER + self._rank * _ROW + _PRESENT] = 1
        self.words = words

    def has_ended(self, rank: int) -> bool:
        """Whether another rank was there and is no more."""
        if self.words is None or not self.words[_HEADER + rank * _ROW + _PRESENT]:
            return False
        return not is_present(self.fd, rank)

    def close(self) -> None:
        """The file, which a forked child must not keep either. What is mapped stays."""
        if self._offer is not None:
            self._offer.close()
        if self._close is not None:
            self._close()

    def _hold(self, fd: int) -> None:
        if self._close is not None:
            self._close()
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False

    def _mapped(self) -> memoryview:
        # By another description: Python's mapping keeps a file open, in a forked child, too, and would keep the locks.
        with FileIO(f"/proc/self/fd/{self.fd}", "r+") as file:
            return memoryview(mmap.mmap(file.fileno(), self._bytes)).cast("Q")


def _host() -> dict[str, Any] | None:
    try:
        return host_identity()
    except OSError:  # nothing can be seen from here
        return None
