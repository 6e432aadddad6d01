"""In words: why a graph runs unfused, and what went wrong where a rank left what others had begun to run."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ....symm_mem import WeftError
from ....symm_mem.heap.registry import heaps_of
from .signature import digest
from .votes.board import VoteBoard
from .votes.vote_rows import ABSENT, ANOTHER_GRAPH, CANNOT_FUSE, ENDED, LATE, NO_BOARD, PASSED_BY, Answer


def reason_of(answer: Answer, where: VoteBoard, what: list[str], waited: float) -> str:
    """Why this rank was answered that it cannot run its graph fused. ``what``: became of the graph's collectives."""
    peer = answer.peer
    if answer.why == NO_BOARD and where.blind is not None:
        return f"rank {where.blind[0]} cannot open the ranks' board: {where.blind[1]}"
    if answer.why == ANOTHER_GRAPH and peer != where.rank:
        return f"rank {peer} runs another graph: {differing_collective(what, where.told(peer))}"
    return {
        LATE: f"rank {peer} did not come within {waited:g} s",
        ENDED: f"the process of rank {peer} has ended",
        ABSENT: f"rank {peer} runs without graphs of this pass since it was waited for in vain",
        NO_BOARD: "the rank that made the ranks' board does not hand it over",
        PASSED_BY: f"rank {peer} does this graph's collectives outside of a graph of this pass",
        CANNOT_FUSE: f"rank {peer} runs this graph unfused",
    }.get(answer.why, "ranks run different graphs")


def differing_collective(own: list[str], other: list[str] | None) -> str:
    """The first collective in which two graphs differ."""
    if other is None:
        return "which one is not known"
    for i, (a, b) in enumerate(zip(own, other, strict=False)):
        if a != b:
            return f"collective {i} is {b} there, {a} here"
    if len(own) != len(other):
        return f"it has {len(other)} collectives, this one {len(own)}"
    return "with the same collectives, whose ops get other shapes, addends or factors, or elements in another order"


def broken_by_leaving(where: VoteBoard, group: ProcessGroup) -> WeftError | None:
    """A rank has left: breaks the group on this one, for others wait inside of ops. None if it was reset since. Nobody
    waits where it has left because of its numbers."""
    if where.numbers_differ:
        return WeftError(
            f"agree on a graph in group {group.group_name!r}: rank {where.left()[0]} has other numbers than another "
            "rank, such as factors or slices, in a graph that sequence_parallel or loss_parallel has changed in the "
            "belief that all have the same: results would be wrong. Without these settings ranks may differ"
        )
    heaps = heaps_of(group)
    if not where.notes_session(digest(heaps[0].rendezvous.session) if heaps else 0):
        return None
    rank, came, expected = where.left()
    if came is None or expected is None or came == expected:
        how = "it did the same collectives elsewhere, outside of a graph of this pass, say"
    else:
        how = differing_collective(expected, came)
    error = WeftError(
        f"agree on a graph in group {group.group_name!r}: rank {rank} came to another graph than others, which have "
        f"begun to run one fused that all ranks know: {how}; symm_mem.reset() by all ranks makes the group usable "
        "again, and from then on its ranks ask each other before each graph"
    )
    error.culprit = rank  # type: ignore[attr-defined]
    for heap in heaps:
        if heap.fault is not None:
            heap.fault.breaks(error)
    return error
