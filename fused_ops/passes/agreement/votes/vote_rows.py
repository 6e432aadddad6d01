"""What a rank asks the others before it runs a graph: the rows of a vote board have what each rank posted last, and the
answer that follows from it, by the rules of docs/protocol.md#votes-of-graphs.
"""

from __future__ import annotations

from typing import NamedTuple

UNDECIDED, FUSED, PLAIN = range(3)
#: Why PLAIN; ``peer`` is the rank that it is about. LEFT: ``peer`` has left what others had run.
NOTHING, CANNOT_FUSE, ANOTHER_GRAPH, PASSED_BY, LATE, NO_BOARD, ABSENT, ENDED, LEFT = range(9)

# A rank's words: its post (from which a count of 1 on there is one) and the answer.
_TURN, _BEGUN, _COUNT, _SIGNATURE, _CAN_FUSE, _ANSWER, _WHY, _PEER, _POSTS = range(9)
_PRESENT = 9  # 1 once the rank has shown its presence
_RUN = 10  # graphs that it has run fused: here, so that one who is interrupted while it asks has it, too
_IN_VAIN = 11  # 1 + the rank that it has waited for in vain and that has not come there since; 0: none
_NUMBERS = 12  # of the post
_RING, _TURNS_KEPT = 16, 128  # the graphs of its last turns
_ROW = _RING + 3 * _TURNS_KEPT

_SECRET = 4  # words before all
# Graphs in a row before which all ranks met and agreed, since one that could fuse was last told to run unfused; whether
# ranks have run different graphs.
_AGREED, _DIFFERED = range(_SECRET, _SECRET + 2)
# How often a rank has left; the last one, what it came with, what had run there, which heap's session that was, and the
# turn with which all go on.
_LEAVES, _LEAVER, _CAME, _EXPECTED, _SESSION, _GO_ON = range(_DIFFERED + 1, _DIFFERED + 7)
_HEADER = 16

TRUSTED = 32  # graphs in a row on which ranks must have agreed before they run what they know without asking
FARTHEST = 96  # turns that a rank may be ahead of another one


class Vote(NamedTuple):
    """A graph that a rank is about to run.

    Attributes:
        begun: collectives that the rank's backend has begun in the group.
        count: collectives of the group in the graph as it was written.
        signature: 64 bits; equal for graphs that communicate alike when fused.
        can_fuse: whether the rank could run it fused.
        numbers: ``NUMBERS`` of the graph in the group; 0: it has none.
    """

    begun: int
    count: int  # type: ignore[assignment]
    signature: int
    can_fuse: bool
    numbers: int = 0


class Answer(NamedTuple):
    fused: bool
    why: int = NOTHING
    peer: int = -1


def row_of(rank: int) -> int:
    """Where a rank's words begin."""
    return _HEADER + rank * _ROW


def ring_of(turn: int) -> int:
    """Where in a row the graph of a turn stands: collectives that the backend had begun, their count, signature."""
    return _RING + 3 * (turn % _TURNS_KEPT)


def trusted(words: memoryview) -> bool:
    """Whether ranks run the graphs that they know without asking."""
    return words[_AGREED] >= TRUSTED and not words[_DIFFERED]


def is_free(words: memoryview, others: list[int], turn: int, graph: tuple[int, int, int]) -> bool:
    """Whether a rank that knows the graph may run it in this turn: no other one, of these rows, waits, is too far
    behind, or has run, or is to run, something else there."""
    if not trusted(words):
        return False
    ring = ring_of(turn)
    for row in others:
        answer, run = words[row + _ANSWER], words[row + _RUN]
        if answer == UNDECIDED or run + FARTHEST <= turn:
            return False
        if run > turn:
            if tuple(words[row + ring : row + ring + 3]) != graph:
                return False
        elif answer == PLAIN and words[row + _TURN] == turn and _end(words, row) > graph[0]:
            return False
    return True


def _end(words: memoryview, row: int) -> int:
    """The collectives that the backend has begun once those of the last post are done."""
    return words[row + _BEGUN] + words[row + _COUNT]


def _post_of(words: memoryview, row: int) -> tuple[int, ...]:
    return tuple(words[row + _TURN : row + _SIGNATURE + 1])


def _has_other_numbers(words: memoryview, row: int, post: Vote) -> bool:
    """Whether a rank waits before a graph that takes and returns the same, and has other numbers."""
    numbers = words[row + _NUMBERS]
    waits = words[row + _POSTS] and words[row + _ANSWER] == UNDECIDED
    return bool(waits) and numbers != post.numbers and numbers >> 32 == post.numbers >> 32


class VoteRows:
    """The rules by which posts become answers. Whoever calls them has the board's lock."""

    rank: int
    size: int

    def _most(self, words: memoryview) -> int:
        """Graphs that any rank has run fused."""
        return max(words[row_of(rank) + _RUN] for rank in range(self.size))

    def _decide(self, words: memoryview, rank: int, why: int, peer: int) -> None:
        """The rank is told to run its graph unfused."""
        row = row_of(rank)
        words[row + _WHY], words[row + _PEER] = why, peer
        words[row + _IN_VAIN] = peer + 1 if why in (LATE, ABSENT) and peer != rank else 0
        words[row + _ANSWER] = PLAIN
        if words[row + _CAN_FUSE]:
            words[_AGREED] = 0
            if why in (ANOTHER_GRAPH, PASSED_BY):
                words[_DIFFERED] = 1

    def _post(self, words: memoryview, post: Vote) -> None:
        row = row_of(self.rank)
        words[row + _ANSWER] = UNDECIDED
        turn = words[row + _TURN] = words[row + _RUN]
        words[row + _BEGUN], words[row + _COUNT], words[row + _SIGNATURE] = post[:3]
        words[row + _CAN_FUSE], words[row + _NUMBERS] = int(post.can_fuse), post.numbers
        words[row + _POSTS] += 1
        if not post.can_fuse:
            self._decide(words, self.rank, CANNOT_FUSE, self.rank)
        if self._follow(words, post):
            return
        mine, rows = (turn, *post[:3]), [row_of(rank) for rank in range(self.size)]
        if any(_has_other_numbers(words, r, post) and _post_of(words, r)[:2] == mine[:2] for r in rows):
            self._leave(words, post, 0)
            return
        if all(words[r + _ANSWER] == UNDECIDED and _post_of(words, r) == mine for r in rows):
            words[_AGREED] += 1
            for rank in range(self.size):
                self._run(words, rank, post)
            return
        for peer in range(self.size):
            if peer != self.rank:
                self._meet(words, post, peer)
        self._spread(words)

    def _run(self, words: memoryview, rank: int, post: Vote) -> None:
        """The rank runs its graph fused, in its turn."""
        row = row_of(rank)
        turn = words[row + _RUN]
        at = row + ring_of(turn)
        words[at], words[at + 1], words[at + 2] = post[:3]
        words[row + _RUN] = turn + 1
        words[row + _WHY], words[row + _PEER], words[row + _ANSWER] = NOTHING, rank, FUSED

    def _follow(self, words: memoryview, post: Vote) -> bool:
        """Whether others run this turn's graph fused, or have run it. Then it is this one, or comes later, or this rank
        has left."""
        turn = words[row_of(self.rank) + _RUN]
        first = next((r for r in range(self.size) if words[row_of(r) + _RUN] > turn), None)
        if first is None:
            return False
        at = row_of(first) + ring_of(turn)
        there = tuple(words[at : at + 3])
        if post.can_fuse and post[:3] == there:
            self._run(words, self.rank, post)
        elif post.begun + post.count > there[0]:
            self._leave(words, post, there[2])
        elif post.can_fuse:
            self._decide(words, self.rank, PASSED_BY, first)
        return True

    def _leave(self, words: memoryview, post: Vote, expected: int) -> None:
        """Others wait in vain inside of their graphs; or, if 0 is ``expected``, a rank waits here with other numbers.
        All ranks hear of it, and go on as if none had run more."""
        words[_LEAVER], words[_CAME], words[_EXPECTED] = self.rank, post.signature, expected
        words[_SESSION] = 0
        words[_LEAVES] += 1
        words[_DIFFERED] = 1
        # What was posted here is of no turn to come.
        words[_GO_ON] = max(self._most(words), words[row_of(self.rank) + _RUN] + 1)
        for each in range(self.size):
            if each == self.rank or words[row_of(each) + _ANSWER] == UNDECIDED:
                self._decide(words, each, LEFT, self.rank)

    def _meet(self, words: memoryview, post: Vote, peer: int) -> None:
        """What the peer's last post says about this rank's, and the other way round."""
        row, own = row_of(peer), row_of(self.rank)
        if not words[row + _POSTS] or words[row + _ANSWER] == FUSED:
            return  # it has not come yet
        turn, begun, count, signature = _post_of(words, row)
        if turn != words[own + _TURN]:
            return  # it is on its way here
        waits = words[row + _ANSWER] == UNDECIDED
        in_vain = words[row + _IN_VAIN] == self.rank + 1
        if (begun, count, signature) == post[:3]:  # the answer to one is the answer to the other
            if in_vain:  # this rank was only late
                words[row + _IN_VAIN] = 0
            return
        if begun + count <= post.begun:
            if waits:  # where this rank has been without a post
                self._decide(words, peer, PASSED_BY, self.rank)
            elif in_vain:
                words[_DIFFERED] = 1
            return
        passed = post.begun + post.count <= begun
        if waits and not passed:
            self._decide(words, peer, ANOTHER_GRAPH, self.rank)
        if words[own + _ANSWER] == UNDECIDED:
            if passed and in_vain and not waits:  # this rank was only late
                self._decide(words, self.rank, LATE, self.rank)
            else:
                self._decide(words, self.rank, PASSED_BY if passed else ANOTHER_GRAPH, peer)

    def _spread(self, words: memoryview) -> None:
        """Equal posts have the same answer."""
        rows = [(r, row_of(r)) for r in range(self.size) if words[row_of(r) + _POSTS]]
        plain = {_post_of(words, row): row for _, row in rows if words[row + _ANSWER] == PLAIN}
        for rank, row in rows if plain else ():
            source = plain.get(_post_of(words, row))
            if source is not None and words[row + _ANSWER] == UNDECIDED:
                why, peer = words[source + _WHY], words[source + _PEER]
                self._decide(words, rank, LATE if peer == rank else why, peer)
                words[row + _IN_VAIN] = words[source + _IN_VAIN]

    def _missing(self, words: memoryview) -> int:
        """The first rank that does not wait where this one does."""
        mine = _post_of(words, row_of(self.rank))
        for rank in range(self.size):
            row = row_of(rank)
            if _post_of(words, row) != mine or words[row + _ANSWER] != UNDECIDED:
                return rank
        return self.rank
