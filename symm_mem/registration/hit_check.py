"""Whether all ranks find the tensors of a call registered already, or none does.

Each rank has a page that all can read. At every call it writes there which of its tensors it knows. A rank that knows
all of them goes on at once. One that does not waits until the others have come as far, compares, and names whoever has
found otherwise. In the checked mode all ranks wait and compare.

The last ``_KEPT`` calls stand on the page, since who goes on at once may be ahead.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from ..call_site import call_site, text
from ..errors import RankMismatch
from ..failure.rank_pages import FIRST, RankPages

if TYPE_CHECKING:
    from ..heap.heap import Heap

_KEPT = 64
_ENTRY = 256  # bytes
_HEAD = struct.Struct("<IH")  # the call's number, and the text's length
_MOST_SAID = _ENTRY - _HEAD.size


class HitCheck:
    """The pages of one group's ranks. Making one is collective."""

    def __init__(self, heap: Heap) -> None:
        self._group = heap.group_name
        self._pages = RankPages(heap, _KEPT * _ENTRY, "the pages of registrations")
        self._own, self._own_count = self._pages.own, self._pages.own_count
        self._count = 0

    def reset_state(self) -> None:
        """Count from 0 again: the heap is being reset."""
        self._count = self._own_count.value = 0

    def post(self, found: str) -> None:
        """Begin the next call: which of its tensors this rank knows."""
        self._count = count = (self._count + 1) & 0xFFFFFFFF
        said = found.encode()[:_MOST_SAID]
        at = FIRST + count % _KEPT * _ENTRY
        self._own[at : at + _HEAD.size + len(said)] = _HEAD.pack(count, len(said)) + said
        self._own_count.value = count

    def compare(self, op: str) -> None:
        """All ranks must have posted the same of this call.

        Raises:
            RankMismatch: the first rank that has posted otherwise than rank 0.
            PeerTimeout: a rank did not come.
        """
        count, flag = self._count, "its count of registrations"
        pages = self._pages.counted(op, count, flag, text(call_site()))
        said = [self._read(page, count) for page in pages]
        for rank, found in enumerate(said):
            if found != said[0]:
                raise RankMismatch(f"{op}, call {count}", self._group, rank, found, said[0])

    @staticmethod
    def _read(page: mmap.mmap, count: int) -> str:
        at = FIRST + count % _KEPT * _ENTRY
        found, length = _HEAD.unpack_from(page, at)
        if found != count:
            return f"tensors that it knew, in {(found - count) & 0xFFFFFFFF} calls since"
        return bytes(page[at + _HEAD.size : at + _HEAD.size + min(length, _ENTRY)]).decode(errors="replace")
