"""Whether all ranks find the tensors of a call registered already, or none does.

Each rank has a page of host memory that all can read. At every call it writes there which of its tensors it knows. A
rank that knows all of them goes on at once. One that does not waits until the others have come as far, compares, and
names whoever has found otherwise. In the checked mode all ranks wait and compare.

The last ``_KEPT`` calls stand on the page, since who goes on at once may be ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import TYPE_CHECKING

from ..bootstrap.fd_exchange import close_fds, exchange
from ..call_site import call_site, text
from ..errors import PeerTimeout, PeerWait, RankMismatch
from ..failure.fault import fault_of
from ..failure.spin_wait import Expired, PeerLiveness, spin
from ..timeouts import get_timeout

if TYPE_CHECKING:
    from ..heap.heap import Heap

_KEPT = 64
_FIRST, _ENTRY = 64, 256  # bytes: where the entries begin, and how long each is
_HEAD = struct.Struct("<IH")  # the call's number, and the text's length
_MOST_SAID = _ENTRY - _HEAD.size
_BYTES = _FIRST + _KEPT * _ENTRY


class HitCheck:
    """The pages of one group's ranks. Making one is collective."""

    def __init__(self, heap: Heap) -> None:
        self._heap, self._fault = heap, fault_of(heap)
        fds: list[int] = []
        try:
            heap.rendezvous.run_on_all("make the pages of registrations", lambda: fds.append(_file()))
            fds = exchange(heap.rendezvous, fds[0], heap.secret)
            self._pages = heap.rendezvous.run_on_all(
                "map the pages of registrations", lambda: [mmap.mmap(fd, _BYTES) for fd in fds]
            )
        finally:
            close_fds(fds)
        self._counts = [ctypes.c_uint32.from_buffer(page) for page in self._pages]
        self._own, self._own_count = self._pages[heap.rank], self._counts[heap.rank]
        self._count = 0

    def reset_state(self) -> None:
        """Count from 0 again: the heap is being reset."""
        self._count = self._counts[self._heap.rank].value = 0

    def post(self, found: str) -> None:
        """Begin the next call: which of its tensors this rank knows."""
        self._count = count = (self._count + 1) & 0xFFFFFFFF
        said = found.encode()[:_MOST_SAID]
        at = _FIRST + count % _KEPT * _ENTRY
        self._own[at : at + _HEAD.size + len(said)] = _HEAD.pack(count, len(said)) + said
        self._own_count.value = count

    def compare(self, op: str) -> None:
        """All ranks must have posted the same of this call.

        Raises:
            RankMismatch: the first rank that has posted otherwise than rank 0.
            PeerTimeout: a rank did not come.
        """
        heap, count, site = self._heap, self._count, text(call_site())
        said = []
        for rank, page in enumerate(self._pages):
            if rank != heap.rank:
                notice = self._fault.abort_notice(rank) if heap.device.type == "cpu" else None
                peer = PeerLiveness(heap.rendezvous.processes[rank], notice)
                address = ctypes.addressof(self._counts[rank])
                try:
                    spin(address, count, get_timeout(heap.group_name), peer, self._fault.raise_if_broken)
                except Expired as e:
                    flag = "its count of registrations"
                    wait = PeerWait(op, heap.group_name, heap.rank, rank, flag, count, site)
                    raise self._fault.breaks(PeerTimeout(wait, e.outcome)).again() from None
            said.append(self._read(page, count))
        for rank, found in enumerate(said):
            if found != said[0]:
                raise RankMismatch(f"{op}, call {count}", heap.group_name, rank, found, said[0])

    @staticmethod
    def _read(page: mmap.mmap, count: int) -> str:
        at = _FIRST + count % _KEPT * _ENTRY
        found, length = _HEAD.unpack_from(page, at)
        if found != count:
            return f"tensors that it knew, in {(found - count) & 0xFFFFFFFF} calls since"
        return bytes(page[at + _HEAD.size : at + _HEAD.size + min(length, _ENTRY)]).decode(errors="replace")


def _file() -> int:
    fd = os.memfd_create("weft-registrations", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _BYTES)
    except BaseException:
        os.close(fd)
        raise
    return fd
