"""How much of a heap is in use, and for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..groups import Group
from .registry import known_heap_of


@dataclass(frozen=True)
class HeapStats:
    """Bytes of this rank's part of a heap; all ranks' are the same, but for what one has dropped before the others.

    >>> from weft.symm_mem import HeapStats
    >>> print(HeapStats(mapped=8 << 20, in_use=1 << 20, peak=2 << 20, by_purpose={"symm_mem.empty": 1 << 20}))
    8.0 MiB mapped, 1.0 MiB in use, 2.0 MiB at most: symm_mem.empty 1.0 MiB

    Attributes:
        mapped: memory that the heap has taken. It grows by chunks and is given back with the group.
        in_use: of that, what somebody holds.
        peak: the most that was allocated at a time, with what was dropped and not yet used again.
        by_purpose: ``in_use`` by what it is for: "symm_mem.empty", workspaces by the kind of their calls, and others.
        registered: how many registrations there are, of a tensor of each rank.
        segments: in how many segments of all ranks they lie, with those that are kept mapped though nobody uses them.
        reserved: bytes of address space that mappings of the peers' segments take.
    """

    mapped: int = 0
    in_use: int = 0
    peak: int = 0
    by_purpose: Mapping[str, int] = field(default_factory=dict)
    registered: int = 0
    segments: int = 0
    reserved: int = 0

    def __str__(self) -> str:
        mapped, in_use, peak = (
            f"{size / (1 << 20):.1f} MiB" for size in (self.mapped, self.in_use, self.peak)
        )
        parts = [f"{purpose} {size / (1 << 20):.1f} MiB" for purpose, size in self.by_purpose.items()]
        text = f"{mapped} mapped, {in_use} in use, {peak} at most" + (
            f": {', '.join(parts)}" if parts else ""
        )
        if self.segments:
            reserved = f"{self.reserved / (1 << 20):.1f} MiB"
            text += f"; {self.registered} registered in {self.segments} segments, {reserved} of addresses"
        return text


def stats(group: Group = None, device: torch.device | str | None = None) -> HeapStats:
    """How much of a group's heap is in use. Not collective: it makes no heap, and waits for nobody.

    >>> from weft import symm_mem
    >>> before = symm_mem.stats().in_use
    >>> x = symm_mem.empty(1024)
    >>> symm_mem.stats().in_use - before >= 4096
    True

    Args:
        group: name, ProcessGroup, 1-D DeviceMesh or (mesh, dim); default the default group.
        device: as for ``empty``.

    Returns:
        zeros where no heap was made yet, or none can be.

    Raises:
        ValueError, TypeError: there is no such group or device.
    """
    heap = known_heap_of(group, device)
    if heap is None:
        return HeapStats()
    by_purpose: Counter[str] = Counter()
    for placed in heap.held():
        by_purpose[placed.purpose] += placed.size
    registrations = {} if heap.registrations is None else heap.registrations.counts
    purposes = dict(by_purpose.most_common())
    return HeapStats(heap.capacity, by_purpose.total(), heap.peak, purposes, **registrations)
