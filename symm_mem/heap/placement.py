"""Where blocks lie, and what they are for."""

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
