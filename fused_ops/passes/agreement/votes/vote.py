"""What a rank asks the others before it runs a graph, and what it is answered (``board``)."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed import ProcessGroup, get_backend

UNDECIDED, FUSED, PLAIN = range(3)
#: Why PLAIN; ``peer`` is the rank that it is about.
NOTHING, CANNOT_FUSE, ANOTHER_GRAPH, PASSED_BY, LATE, NO_BOARD, LOCKED, ABSENT, ENDED = range(9)
#: Why there is no answer any more: ``peer`` has left what others had run.
LEFT = 9


class Vote(NamedTuple):
    """A graph that a rank is about to run.

    Attributes:
        turns: graphs that this rank has run fused in the group.
        begun: collectives that the rank's backend has begun in the group.
        count: collectives of the group in the graph as it was written.
        signature: 64 bits; equal for graphs that communicate alike when fused.
        can_fuse: whether the rank could run it fused.
    """

    turns: int
    begun: int
    count: int  # type: ignore[assignment]
    signature: int
    can_fuse: bool

    @property
    def graph(self) -> tuple[int, int, int]:
        """Place and graph, which are the same on all ranks that run one graph."""
        return self.begun, self.count, self.signature

    @property
    def digest(self) -> int:
        """Of numbers Python makes the same one in every process."""
        return hash(self[:4]) & _WORD or 1


_WORD = (1 << 64) - 1


class Answer(NamedTuple):
    fused: bool
    why: int = NOTHING
    peer: int = -1


def begun(group: ProcessGroup) -> int:
    """Collectives that the backend has begun in the group. RuntimeError: the backend does not count them."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


class GroupBackend(NamedTuple):
    """The backend of a group.

    Attributes:
        name: as torch has it.
        counts: whether it counts collectives, without which ranks cannot agree.
    """

    name: str
    counts: bool

    @property
    def is_fake(self) -> bool:
        """Whether there are no other ranks to be asked."""
        return self.name == "fake"


def backend_of(group: ProcessGroup) -> GroupBackend:
    """What a graph's collectives are run by, as far as ranks that may have to agree on it."""
    try:
        begun(group)
    except RuntimeError:
        return GroupBackend(get_backend(group), counts=False)
    return GroupBackend(get_backend(group), counts=True)
