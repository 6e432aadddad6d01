"""What a rank asks the others before it runs a graph, and what it is answered (``board``)."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed import ProcessGroup, get_backend

UNDECIDED, FUSED, PLAIN = range(3)
#: Why PLAIN; ``peer`` is the rank that it is about. LEFT: ``peer`` has left what others had run.
NOTHING, CANNOT_FUSE, ANOTHER_GRAPH, PASSED_BY, LATE, NO_BOARD, ABSENT, ENDED, LEFT = range(9)


class Vote(NamedTuple):
    """A graph that a rank is about to run.

    Attributes:
        begun: collectives that the rank's backend has begun in the group, but for those in graphs that ran fused.
        count: collectives of the group in the graph as it was written.
        signature: 64 bits; equal for graphs that communicate alike when fused.
        can_fuse: whether the rank could run it fused.
    """

    begun: int
    count: int  # type: ignore[assignment]
    signature: int
    can_fuse: bool


class Answer(NamedTuple):
    fused: bool
    why: int = NOTHING
    peer: int = -1


def begun(group: ProcessGroup) -> int:
    """Collectives that the backend has begun in the group. RuntimeError: the backend does not count them."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def uncounting_backend(group: ProcessGroup) -> str | None:
    """The group's backend if it counts no collectives, so that its ranks cannot agree; the one without ranks is
    "fake". None if it counts."""
    try:
        begun(group)
    except RuntimeError:
        return get_backend(group)
    return None
