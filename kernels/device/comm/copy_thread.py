"""The copy engine of CPU ranks: a thread that moves data while the caller computes; shards that it gathers, and
partial results that it scatters."""

from __future__ import annotations

import queue
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from ....symm_mem.workspace import HostEpoch, Workspace

CHUNKS = 2  #: of a shard that is gathered, sent one by one


class CopyThread:
    """Runs ``push`` in a thread during the body of a ``with``. The end of the body waits for it, and raises what the
    first of the two raised.

    When one of them fails, so does the group on this rank: then the other one waits for no peer any more.

    Args:
        end: tells ``push`` that the body has nothing more for it; called however the body ends, also before it begins.
    """

    # A threading.Thread is thirty Python calls more than this one, at each call of an op.

    def __init__(
        self, workspace: Workspace, push: Callable[[], None], end: Callable[[], None] | None = None
    ) -> None:
        self._workspace, self._push, self._end = workspace, push, end
        self._failures: list[BaseException] = []
        self._begun, self._ended = allocate_lock(), allocate_lock()
        self._ended.acquire()

    def __enter__(self) -> None:
        try:
            start_new_thread(self._run, ())
        except BaseException as e:  # there can be no more threads, or Ctrl-C, before the start or after it
            self.__exit__(type(e), e, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)
        if self._end is not None:
            self._end()
        try:
            self._join()  # its waits are bounded
        except BaseException as e:  # Ctrl-C
            self._failed(e)
            self._join()
        if self._failures and self._failures[0] is not error:
            raise self._failures[0]

    def _failed(self, error: BaseException) -> None:
        self._failures.append(error)
        self._workspace.abandon(error)

    def _run(self) -> None:
        if not self._begun.acquire(False):
            return
        try:
            self._workspace.raise_if_broken()  # Ctrl-C may have come before this thread began
            self._push()
        except BaseException as e:
            self._failed(e)
        finally:
            self._ended.release()

    def _join(self) -> None:
        if self._failures and self._begun.acquire(False):
            return  # it has not begun, and does nothing if it does
        with self._ended:
            pass


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


def sum_of_products(
    workspace: Workspace,
    op: str,
    product_for: Callable[[int], torch.Tensor],
    reduce_op: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The sum over ranks of the partial results for this one, in float32.

    Args:
        op: whose call it is.
        product_for: computes the partial result for a rank, of one shape; the own one last, which is not rounded.
        dtype: in which they travel.
    """
    size, rank = workspace.world_size, workspace.rank
    with workspace.lock, HostEpoch(workspace, op) as epoch:
        finished: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()

        def slots(at: int, like: torch.Tensor) -> torch.Tensor:
            return epoch.slots(at, (size, *like.shape), dtype)

        def push() -> None:
            while (item := finished.get()) is not None:
                peer, partial = item
                epoch.wait_free(peer)
                slots(peer, partial)[rank] = partial
                epoch.post(peer, 0)

        with CopyThread(workspace, push, lambda: finished.put(None)):
            for step in range(1, size):
                peer = (rank + step) % size
                finished.put((peer, product_for(peer)))
            own = product_for(rank)
            arrived = slots(rank, own)
            total: torch.Tensor | None = None
            for src in range(size):
                if src != rank:
                    epoch.wait(src, 0)
                part = own if src == rank else arrived[src]
                # From 0.0 on, a sum of -0.0 would be 0.0.
                total = part.to(torch.float32, copy=True) if total is None else total.add_(part)
    assert total is not None
    if reduce_op == "avg":
        total /= size
    return total
