"""Where blocks lie, what they are for, and what is free between them."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """Where a block lies. Its first ``zero`` bytes are control words, or empty LL slots; ``tag`` is what it is for."""

    offset: int
    size: int
    zero: int
    tag: str

    @property
    def purpose(self) -> str:
        """The kind of thing that it is for, without sizes: "symm_mem.empty", "matmul workspace"."""
        if self.tag.startswith("empty"):
            return "symm_mem.empty"
        kind, found, _ = self.tag.partition(" workspace ")
        return f"{kind} workspace" if found else self.tag.partition(" in ")[0]


class FreeList:
    """First fit over one growing range. Ranks that make the same calls in the same order hold the same list."""

    def __init__(self) -> None:
        self.holes: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent

    def take(self, size: int) -> int | None:
        for i, (offset, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i : i + 1] = [(offset + size, hole - size)] if hole > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.holes, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.holes = merged

    def tail(self, end: int) -> int:
        """Bytes free at the very end of the range."""
        return self.holes[-1][1] if self.holes and sum(self.holes[-1]) == end else 0
