"""What each rank says, on a page of host memory that all ranks of the group can read, also with a heap on CUDA.

Whoever has written an entry to its page counts up; the others read it once that count is as far as they are. The last
entries stand on the page, since a rank that does not compare what it says may be ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from ..backends.host import shared_memory
from ..bootstrap.fd_exchange import close_fds, exchange
from ..call_site import call_site, text
from ..errors import PeerWait, RankMismatch
from .fault import fault_of

if TYPE_CHECKING:
    from ..heap.heap import Heap

_FIRST = 64  # bytes: where entries begin, after the count
_HEAD = struct.Struct("<IH")  # an entry's number, and the length of what follows


class RankPages:
    """The pages of one group's ranks. Making them is collective.

    Args:
        kept: entries that a page has room for.
        size: bytes of each; what is longer is cut off.
        what: the pages, and what their count is called, for errors.
    """

    def __init__(self, heap: Heap, kept: int, size: int, what: tuple[str, str]) -> None:
        self._rank, self._group, self._fault = heap.rank, heap.group_name, fault_of(heap)
        self._kept, self._size, (name, self._flag) = kept, size, what
        self.count = 0  #: entries of this rank
        whole = _FIRST + kept * size
        fds: list[int] = []
        try:
            # Entered before the ranks hear of each other: another one's problem must not leave it open.
            heap.rendezvous.run_on_all(f"make {name}", lambda: fds.append(shared_memory(whole)))
            fds = exchange(heap.rendezvous, fds[0], heap.secret)
            self._pages = heap.rendezvous.run_on_all(
                f"map {name}", lambda: [mmap.mmap(fd, whole) for fd in fds]
            )
        finally:
            close_fds(fds)
        # A ctypes object over a page keeps it mapped.
        self._counts = [ctypes.c_uint32.from_buffer(page) for page in self._pages]
        self._own, self._own_count = self._pages[heap.rank], self._counts[heap.rank]
        heap.users.add(self)

    def reset_state(self) -> None:
        """Count from 0 again: the heap is being reset."""
        self.count = self._own_count.value = 0

    def post(self, said: bytes) -> None:
        """Write this rank's next entry."""
        self.count = count = (self.count + 1) & 0xFFFFFFFF
        said = said[: self._size - _HEAD.size]
        at = self._at(count)
        self._own[at : at + _HEAD.size + len(said)] = _HEAD.pack(count, len(said)) + said
        self._own_count.value = count

    def compare(self, op: str, what: str, digest: int = 0) -> None:
        """All ranks must have posted the same as this one did last.

        Args:
            op: whose waits these are, for errors.
            what: is compared, for errors.
            digest: so many bytes in front are compared, and what follows is shown; 0: all of it is both.

        Raises:
            RankMismatch: the first rank that has posted otherwise than rank 0.
            PeerTimeout: a rank did not come, or has posted an abort notice.
        """
        site = text(call_site())
        entries = [self._entry(rank, op, site) for rank in range(len(self._pages))]
        compared = [entry[: digest or None] for entry in entries]
        for rank, found in enumerate(compared):
            if found != compared[0]:
                shown = [entries[r][digest:].decode(errors="replace") for r in (rank, 0)]
                raise RankMismatch(what, self._group, rank, *shown)

    def _entry(self, rank: int, op: str, site: str | None) -> bytes:
        """A rank's entry of the same number as this one's last."""
        if rank != self._rank:
            wait = PeerWait(op, self._group, self._rank, rank, self._flag, self.count, site)
            self._fault.wait_until(
                ctypes.addressof(self._counts[rank]),
                self.count,
                rank,
                lambda seconds: replace(wait, causes=self._fault.causes(seconds)),
            )
        page, at = self._pages[rank], self._at(self.count)
        found, length = _HEAD.unpack_from(page, at)
        if found != self.count:
            # Who compares each entry is not ahead: these are the pages of registrations.
            return f"tensors that it knew, in {(found - self.count) & 0xFFFFFFFF} calls since".encode()
        return page[at + _HEAD.size : at + min(_HEAD.size + length, self._size)]

    def _at(self, count: int) -> int:
        return _FIRST + count % self._kept * self._size
