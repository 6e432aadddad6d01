"""A page of host memory of each rank, which begins with a count. All ranks of a group can read it, also with a heap
on CUDA. Who has written to its page counts up; the others read it once that count is as far as they are."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..bootstrap.fd_exchange import close_fds, exchange
from ..errors import PeerTimeout, PeerWait
from ..timeouts import get_timeout
from .fault import fault_of
from .spin_wait import Expired, PeerLiveness, spin

if TYPE_CHECKING:
    from ..heap.heap import Heap

FIRST = 64  #: bytes: where content begins, after the count


class RankPages:
    """The pages of one group's ranks. Making them is collective.

    Args:
        size: bytes of content.
        what: the pages, for errors.

    Attributes:
        own: this rank's page.
        own_count: its count. (A ctypes object over a page keeps it mapped.)
    """

    def __init__(self, heap: Heap, size: int, what: str) -> None:
        # Not the heap, which keeps the pages.
        self._rank, self._group, self._rendezvous = heap.rank, heap.group_name, heap.rendezvous
        self._fault = fault_of(heap)
        # On CUDA abort notices lie where the host cannot read them.
        on_host = heap.device.type == "cpu"
        self._abort_notices = [
            self._fault.abort_notice(rank) if on_host else None for rank in range(heap.world_size)
        ]
        fds: list[int] = []
        try:
            # Entered before the ranks hear of each other: another one's problem must not leave it open.
            heap.rendezvous.run_on_all(f"make {what}", lambda: fds.append(make_page(FIRST + size)))
            fds = exchange(heap.rendezvous, fds[0], heap.secret)
            self._pages = heap.rendezvous.run_on_all(
                f"map {what}", lambda: [mmap.mmap(fd, FIRST + size) for fd in fds]
            )
        finally:
            close_fds(fds)
        self._counts = [ctypes.c_uint32.from_buffer(page) for page in self._pages]
        self.own, self.own_count = self._pages[heap.rank], self._counts[heap.rank]

    def counted(self, op: str, count: int, flag: str, site: str | None) -> Iterator[mmap.mmap]:
        """Each rank's page, in rank order, once it has counted as far.

        Args:
            op, flag, site: whose wait it is, what its count is called, and where it was called, for errors.

        Raises:
            PeerTimeout: a rank does not come, or has posted an abort notice.
        """
        timeout = get_timeout(self._group)
        for rank, page in enumerate(self._pages):
            if rank != self._rank:
                about = partial(PeerWait, op, self._group, self._rank, rank, flag, count, site)
                peer = PeerLiveness(self._rendezvous.processes[rank], self._abort_notices[rank], about)
                address = ctypes.addressof(self._counts[rank])
                try:
                    spin(address, count, timeout, peer, self._fault.raise_if_broken)
                except Expired as e:
                    wait = replace(about(), causes=self._fault.causes(e.outcome.seconds))
                    raise self._fault.breaks(PeerTimeout(wait, e.outcome)).again() from None
            yield page


def make_page(size: int) -> int:
    """Memory in a file of no name, as a descriptor."""
    fd = os.memfd_create("weft-rank-page", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
