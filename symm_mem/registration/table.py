"""The segments that a group's registrations use, the same table on every rank.

Each rank decides from it, and from what all have posted, which segments are new. So it changes only after a step that
all ranks have completed, in one order: segments are taken, given back, and dropped by the same calls everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .segments import LASTING, Mapping, Segment

SegmentKey: TypeAlias = tuple[int, tuple[str, str, int]]  # the owner's rank, and what names it there

UNUSED = 32  #: so many segments that nobody uses are kept, to be found mapped the next time
UNUSED_BYTES = 256 << 20  #: and so many bytes of them: they keep memory that may be nobody's otherwise


@dataclass
class KnownSegment:
    """A segment of ``rank``, how this rank reaches it, and how many registrations use it."""

    rank: int
    segment: Segment
    mapping: Mapping
    users: int = 0


class SegmentTable(dict[SegmentKey, KnownSegment]):
    """See above. In the order in which they were last used."""

    @property
    def bytes(self) -> int:
        """Of address space that mappings of peers' segments take."""
        return sum(known.mapping.bytes for known in self.values())

    def holding(self, rank: int, kind: str, address: int, size: int) -> Segment | None:
        """The segment of ``rank`` in use that holds these bytes."""
        for known in self.values():
            s = known.segment
            there = s.base <= address and address + size <= s.base + s.size
            if there and known.rank == rank and s.kind == kind and known.users:
                return s
        return None

    def use(self, key: SegmentKey, segment: Segment, make: Callable[[], KnownSegment]) -> None:
        """``segment``: as its owner tells of it now; an unused one may have come to lie elsewhere."""
        known = self.pop(key, None) or make()
        known.segment = segment
        known.users += 1
        self[key] = known

    def give_back(self, keys: Iterable[SegmentKey]) -> None:
        for key in keys:
            known = self[key]
            known.users -= 1
            if not known.users:
                del self[key]
                if known.segment.kind in LASTING:
                    self[key] = known
        unused = [key for key, known in self.items() if not known.users]
        left = sum(self[key].segment.size for key in unused)
        for i, key in enumerate(unused):
            if len(unused) - i <= UNUSED and left <= UNUSED_BYTES:
                break
            left -= self[key].segment.size
            del self[key]

    def keep_only(self, used: dict[SegmentKey, int]) -> None:
        """After a reset: those that so many registrations of all ranks use."""
        for key in self.keys() - used:
            del self[key]
        for key, users in used.items():
            self[key].users = users
