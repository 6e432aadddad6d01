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


class SegmentTable:
    """See above. In the order in which they were last used."""

    def __init__(self) -> None:
        self._known: dict[SegmentKey, KnownSegment] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: SegmentKey) -> bool:
        return key in self._known

    def __getitem__(self, key: SegmentKey) -> KnownSegment:
        return self._known[key]

    @property
    def bytes(self) -> int:
        """Of address space that mappings of peers' segments take."""
        return sum(known.mapping.bytes for known in self._known.values())

    def holding(self, rank: int, kind: str, address: int, size: int) -> Segment | None:
        """The segment of ``rank`` in use that holds these bytes."""
        for known in self._known.values():
            s = known.segment
            there = s.base <= address and address + size <= s.base + s.size
            if there and known.rank == rank and s.kind == kind and known.users:
                return s
        return None

    def use(self, key: SegmentKey, segment: Segment, make: Callable[[], KnownSegment]) -> None:
        """``segment``: as its owner tells of it now; an unused one may have come to lie elsewhere."""
        known = self._known.pop(key, None) or make()
        known.segment = segment
        known.users += 1
        self._known[key] = known

    def give_back(self, keys: Iterable[SegmentKey]) -> None:
        for key in keys:
            known = self._known[key]
            known.users -= 1
            if not known.users:
                del self._known[key]
                if known.segment.kind in LASTING:
                    self._known[key] = known
        unused = [key for key, known in self._known.items() if not known.users]
        left = sum(self._known[key].segment.size for key in unused)
        for i, key in enumerate(unused):
            if len(unused) - i <= UNUSED and left <= UNUSED_BYTES:
                break
            left -= self._known[key].segment.size
            del self._known[key]

    def keep_only(self, used: dict[SegmentKey, int]) -> None:
        """After a reset: those that so many registrations of all ranks use."""
        self._known = {key: known for key, known in self._known.items() if key in used}
        for key, users in used.items():
            self._known[key].users = users
