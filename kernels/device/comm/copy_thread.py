"""The copy engine of CPU ranks: a thread that moves data while the caller computes; shards that it gathers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....symm_mem.workspace import HostEpoch, Workspace

CHUNKS = 2  #: of a shard that is gathered, sent one by one


@contextmanager
def copying(
    workspace: Workspace, push: Callable[[], None], end: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run ``push`` in a thread during the body. The end of the body joins it, and raises what the first of the two
    raised.

    When one of them fails, so does the group on this rank: then the other one waits for no peer any more.

    Args:
        end: tells ``push`` that the body has nothing more for it; called however the body ends, also before it begins.
    """
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        workspace.abandon(error)

    def run() -> None:
        try:
            workspace.raise_if_broken()  # Ctrl-C may have come before this thread began
            push()
        except BaseException as e:
            failed(e)

    thread = threading.Thread(target=run, name="weft-copy", daemon=True)
    try:
        thread.start()
        yield
    except BaseException as e:
        failed(e)
    finally:
        end()
    try:
        _join(thread)  # its waits are bounded
    except BaseException as e:  # Ctrl-C
        failed(e)
        _join(thread)
    if failures:
        raise failures[0]


def _join(thread: threading.Thread) -> None:
    if thread.is_alive():  # not one that could not be started
        thread.join()


class Arriving:
    """Shards of all ranks on their way to this one, in an epoch in which a copy thread pushes the local one.

    Args:
        a: the local shard [m, K], contiguous.

    Attributes:
        rank: this one.
        gathered: [W, m, K], as far as it was waited for.
    """

    def __init__(self, epoch: HostEpoch, a: torch.Tensor) -> None:
        m, size, self.rank = a.shape[0], epoch.ws.world_size, epoch.ws.rank
        self._epoch, self._a = epoch, a
        self._slots = [epoch.slots(peer, (size, *a.shape), a.dtype) for peer in range(size)]
        self._chunks = [slice(c * m // CHUNKS, (c + 1) * m // CHUNKS) for c in range(CHUNKS)]
        self.gathered = torch.empty(size, *a.shape, dtype=a.dtype)
        self.gathered[self.rank] = a

    def push(self) -> None:
        """By the copy thread."""
        for step in range(1, len(self._slots)):
            peer = (self.rank - step) % len(self._slots)
            self._epoch.wait_free(peer)
            for c, rows in enumerate(self._chunks):
                self._slots[peer][self.rank, rows] = self._a[rows]
                self._epoch.post(peer, c)

    def each_chunk(self, src: int) -> Iterator[slice]:
        """The rows of a rank's chunks, when they are there."""
        for c, rows in enumerate(self._chunks):
            if src != self.rank:
                self._epoch.wait(src, c)
                self.gathered[src, rows] = self._slots[self.rank][src, rows]
            yield rows

    def wait_for(self, src: int) -> None:
        for _ in self.each_chunk(src):
            pass
