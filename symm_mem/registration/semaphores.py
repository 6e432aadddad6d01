"""The words by which a tensor's owner and whoever accesses it wait for each other.

All words of a group stand in slabs on its heap: a slot of ``ROWS`` rows of ``world_size`` words for each registration,
at the same offset on every rank. Each word has one writer and only grows, modulo 2^32, until its slot is zeroed for
another registration:

=========  ==========================================  =====================================================
row        on rank r, word [p]                         written by
=========  ==========================================  =====================================================
SENT       signals that r, as owner, has sent to p     r
ALLOWED    signals of owner p that have come to r      p, when its stream comes to ``signal``
MOVED      accesses of r to p's tensor that have begun r
DONE       accesses of p to r's tensor that are over   p, after the last byte
WAITED     of those, waited for                        r
=========  ==========================================  =====================================================

``signal``: SENT + 1, into ALLOWED at the peer. ``put`` and ``get``: wait for ALLOWED >= MOVED + 1; move the data; that
number into DONE at the peer. ``wait``: for DONE >= WAITED + 1. A rank polls its own words alone.
docs/protocol.md#registered-tensors has the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..layout import WORD
from ..workspace import Workspace

if TYPE_CHECKING:
    from ..heap.heap import Heap

ROWS = 6
SENT, ALLOWED, MOVED, DONE, WAITED, TICKET = range(ROWS)  # TICKET: by which a kernel's last block is known
SLOTS = 256  # of a slab


@dataclass(frozen=True)
class SlabLayout:
    """What the words of a slab of ``rank`` are, for errors. ``words``: that are zero before the first use.

    ``named``: what has each slot, as a rank has it.
    """

    world_size: int
    first: int
    named: dict[int, Callable[[int], str]]
    rank: int = 0

    @property
    def words(self) -> int:
        return SLOTS * ROWS * self.world_size

    @property
    def bytes(self) -> int:
        return self.words * WORD

    def index(self, slot: int, row: int, rank: int) -> int:
        return (slot % SLOTS * ROWS + row) * self.world_size + rank

    def counter_of(self, word: int) -> int | None:
        """Words count for themselves."""
        return None

    def describe(self, word: int) -> str:
        slot, rest = divmod(word, ROWS * self.world_size)
        row, rank = divmod(rest, self.world_size)
        what = {ALLOWED: "signals", DONE: "accesses"}.get(row, f"row {row}")
        named, slot = self.named.get(self.first + slot), self.first + slot
        # A signal is of the tensor of the rank that sends it.
        of = f"slot {slot}" if named is None else named(rank if row == ALLOWED else self.rank)
        return f"the count of {what} by rank {rank} for registered {of}"


class Semaphores:
    """The slots of one heap. Ranks with the same registrations have the same free ones."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.slabs: list[Workspace[SlabLayout]] = []
        self.named: dict[int, Callable[[int], str]] = {}  #: what has each slot, in words, as a rank has it

    def free(self, count: int, taken: set[int]) -> list[int]:
        """The first ``count`` slots that are not ``taken``. Collective where that needs another slab."""
        while (first := len(self.slabs) * SLOTS) - len(taken) < count:
            layout = SlabLayout(self._heap.world_size, first, self.named, self._heap.rank)
            self.slabs.append(Workspace(self._heap, layout, "semaphores of registered tensors"))
        return [slot for slot in range(first) if slot not in taken][:count]

    def zero(self, slots: list[int]) -> None:
        """Of this rank's words; nobody uses the slots."""
        size = ROWS * self._heap.world_size * WORD
        for slot in slots:
            self._heap.backend.zero(self.address(slot, 0, 0), size)

    def slab(self, slot: int) -> Workspace[SlabLayout]:
        return self.slabs[slot // SLOTS]

    def address(self, slot: int, row: int, rank: int) -> int:
        """Of this rank's word; rank p's lies at ``+ (p - rank) * span``."""
        slab = self.slab(slot)
        return slab.address + WORD * slab.layout.index(slot, row, rank)
