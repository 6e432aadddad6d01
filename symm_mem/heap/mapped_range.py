"""Addresses at which memory of ranks is mapped, and their end: on CUDA not when Python's collector finds it, but at the
next allocation or registration.

The memory at these addresses may be written to until all work is done, and a wait for that is forbidden while any
thread captures a CUDA graph: it would end the capture. A finalizer cannot know. Nor may it wait: it runs between any
two launches of any thread, and peers may wait for the second one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .. import forks
from ..backends.base import Backend


class MappedRange:
    """``size`` bytes of addresses from ``base`` on, of which parts are mapped."""

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend, self._size = backend, size
        self.base = backend.reserve(size)
        self._mapped: list[tuple[int, int]] = []  # (address, size)

    def map(self, address: int, handle: Any, size: int) -> None:
        self._backend.map(address, handle, size)
        self._mapped.append((address, size))

    def adopt(self, address: int, fd: int, size: int) -> None:
        """Map what a peer has given; ``fd`` stays the caller's."""
        handle = self._backend.adopt(fd, size)
        try:
            self.map(address, handle, size)
        finally:  # the mapping keeps the memory
            self._backend.drop(handle)

    def unmap(self, address: int, size: int) -> None:
        """A part, if it is mapped."""
        if (address, size) in self._mapped:
            self._backend.unmap(address, size)
            self._mapped.remove((address, size))

    def close(self) -> None:
        for part in self._mapped:
            self._backend.unmap(*part)
        self._backend.release(self.base, self._size)


_put_off: deque[tuple[int, Backend, Callable[[], Any]]] = deque()  # by process: a forked child has no driver


def close_later(backend: Backend, close: Callable[[], Any]) -> None:
    """For finalizers, in any thread. Between CPU ranks nothing is under way when nobody refers to a range."""
    if backend.device.type == "cuda":
        _put_off.append((forks.pid, backend, close))
    else:
        close()


def close_what_is_gone(quiet: Backend | None = None) -> None:
    """Close what was put off. What cannot be closed now, as a thread captures a graph, is put off again.

    ``quiet``: whose queued work is done.
    """
    for _ in range(len(_put_off)):
        try:
            process, backend, close = _put_off.popleft()
        except IndexError:  # another thread has taken it
            return
        if process != forks.pid:
            continue
        if backend is quiet or backend.quiesce():
            close()
        else:
            _put_off.append((process, backend, close))
