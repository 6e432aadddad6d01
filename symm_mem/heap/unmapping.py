"""Unmaps heaps that are gone: on CUDA not when Python's collector finds them, but at the next allocation.

The memory at these addresses may be written to until all work is done, and a wait for that is forbidden while any
thread captures a CUDA graph: it would end the capture. A finalizer cannot know. Nor may it wait: it runs between any
two launches of any thread, and peers may wait for the second one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .. import forks
from ..backends.base import Backend


@dataclass(frozen=True)
class HeapRange:
    """The addresses of one heap, for all ranks, and what is mapped there: (offset, size) in each rank's range."""

    backend: Backend
    base: int
    span: int
    world_size: int
    chunks: list[tuple[int, int]]

    def unmap(self) -> None:
        for start, size in self.chunks:
            for rank in range(self.world_size):
                self.backend.unmap(self.base + rank * self.span + start, size)
        self.backend.release(self.base, self.span * self.world_size)


_put_off: deque[tuple[int, HeapRange]] = deque()  # by process: a forked child has no driver


def unmap_later(gone: HeapRange) -> None:
    """For finalizers, in any thread. Between CPU ranks nothing is under way when a heap is gone."""
    if gone.backend.device.type == "cuda":
        _put_off.append((forks.pid, gone))
    else:
        gone.unmap()


def unmap_gone_heaps() -> None:
    """Unmap what was put off. What cannot be unmapped now, as a thread captures a graph, is put off again."""
    for _ in range(len(_put_off)):
        try:
            process, gone = _put_off.popleft()
        except IndexError:  # another thread has taken it
            return
        if process != forks.pid:
            continue
        if gone.backend.quiesce():
            gone.unmap()
        else:
            _put_off.append((process, gone))
