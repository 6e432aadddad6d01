"""The free parts of a growing range."""

from __future__ import annotations


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
