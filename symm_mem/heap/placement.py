"""Where blocks lie, what they are for, and where there is room for another one."""

from __future__ import annotations

from collections.abc import Iterable
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


def first_gap(placed: Iterable[Placement], size: int) -> int:
    """The offset of the first ``size`` bytes that are free, which may be behind all blocks."""
    end = 0
    for block in sorted(placed):
        if block.offset - end >= size:
            break
        end = block.offset + block.size
    return end
