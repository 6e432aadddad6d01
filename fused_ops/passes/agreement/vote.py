"""What a rank asks the others before it runs a graph, and what it is answered (``board``)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch.distributed import ProcessGroup

UNDECIDED, FUSED, PLAIN = range(3)
#: Why PLAIN; ``peer`` is the rank that it is about.
NOTHING, CANNOT_FUSE, ANOTHER_GRAPH, PASSED_BY, LATE, NO_BOARD, LOCKED, ABSENT, ENDED = range(9)


@dataclass(frozen=True)
class Vote:
    """A graph that a rank is about to run.

    Attributes:
        turns: graphs that the group has run fused.
        begun: collectives that the rank's backend has begun in the group.
        count: collectives of the group in the graph as it was written.
        signature: 64 bits; equal for graphs that communicate alike when fused.
        willing: whether the rank could run it fused.
    """

    turns: int
    begun: int
    count: int
    signature: int
    can_fuse: bool

    @property
    def digest(self) -> int:
        text = f"{self.turns} {self.begun} {self.count} {self.signature}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1


@dataclass(frozen=True)
class Answer:
    fused: bool
    why: int = NOTHING
    peer: int = -1


def begun(group: ProcessGroup) -> int:
    """Collectives that the backend has begun in the group.

    Raises:
        RuntimeError: the backend does not count them.
    """
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
