"""The rows of a vote board: what each rank posted last, and the answer that follows from it.

Ranks that have agreed often enough need not meet before a graph that they know (``known``). The one that comes first
runs it; then that graph stands in its row, by the number of the run (its turn), and the others compare theirs with it
when they come there. Whoever comes with another one has left: nobody can take back what runs already.
"""

from __future__ import annotations

from .vote import ANOTHER_GRAPH, CANNOT_FUSE, FUSED, LEFT, NOTHING, PASSED_BY, PLAIN, UNDECIDED, Vote

# A rank's words: its post (from which a count of 1 on there is one), the answer, and digests of its last posts.
_TURNS, _BEGUN, _COUNT, _SIGNATURE, _CAN_FUSE, _ANSWER, _WHY, _PEER, _POSTS = range(9)
_PRESENT = 9  # 1 once the rank has shown its presence
_RUN = 10  # graphs that it has run fused: here, so that one who is interrupted while it asks has it, too
_HISTORY, _KEPT = 16, 112
_RING, _TURNS_KEPT = _HISTORY + _KEPT, 128  # the graphs of its last turns
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


def row_of(rank: int) -> int:
    """Where a rank's words begin."""
    return _HEADER + rank * _ROW


def ring_of(turn: int) -> int:
    """Where in a row the graph of a turn stands: collectives that the backend had begun, their count, signature."""
    return _RING + 3 * (turn % _TURNS_KEPT)


def trusted(words: memoryview) -> bool:
    """Whether ranks run the graphs that they know without asking."""
    return words[_AGREED] >= TRUSTED and not words[_DIFFERED]


class VoteRows:
    """The rules by which posts become answers. Whoever calls them has the board's lock."""

    rank: int
    size: int

    def _most(self, words: memoryview) -> int:
        """Graphs that any rank has run fused."""
        return max(words[row_of(rank) + _RUN] for rank in range(self.size))

    def _decide(self, words: memoryview, rank: int, answer: int, why: int, peer: int) -> None:
        row = row_of(rank)
        words[row + _WHY], words[row + _PEER] = why, peer
        words[row + _ANSWER] = answer
        if answer == PLAIN and words[row + _CAN_FUSE]:
            words[_AGREED] = 0
            if why in (ANOTHER_GRAPH, PASSED_BY):
                words[_DIFFERED] = 1

    def _post(self, words: memoryview, rank: int, post: Vote) -> None:
        row = row_of(rank)
        words[row + _ANSWER] = UNDECIDED
        words[row + _TURNS], words[row + _BEGUN], words[row + _COUNT], words[row + _SIGNATURE] = post[:4]
        words[row + _CAN_FUSE] = int(post.can_fuse)
        posts = words[row + _POSTS]
        words[row + _HISTORY + posts % _KEPT] = post.digest
        words[row + _POSTS] = posts + 1
        if not post.can_fuse:
            self._decide(words, rank, PLAIN, CANNOT_FUSE, rank)
        if self._follow(words, rank, post):
            return
        waiting = self._waiting(words, post)
        if waiting is None:
            for peer in range(self.size):
                if peer != rank:
                    self._meet(words, rank, post, peer)
            self._spread(words)
        if waiting == self.size:
            words[_AGREED] += 1
            for each in range(self.size):
                self._run(words, each, post)

    def _waiting(self, words: memoryview, post: Vote) -> int | None:
        """How many ranks wait with this post, if all others run a graph fused or have run it, as in most votes; else
        None."""
        count, mine = 0, post[:4]
        for row in range(_HEADER, _HEADER + self.size * _ROW, _ROW):
            answer = words[row + _ANSWER]
            if answer == UNDECIDED and self._post_of(words, row) == mine:
                count += 1
            elif answer != FUSED:
                return None
        return count

    def _run(self, words: memoryview, rank: int, post: Vote) -> None:
        """The rank runs its graph fused, in this turn."""
        row = row_of(rank)
        at = row + ring_of(post.turns)
        words[at], words[at + 1], words[at + 2] = post.graph
        words[row + _RUN] = post.turns + 1
        words[row + _WHY], words[row + _PEER], words[row + _ANSWER] = NOTHING, rank, FUSED

    def _follow(self, words: memoryview, rank: int, post: Vote) -> bool:
        """Whether others run this turn's graph fused, or have run it. Then it is this one, or comes later, or this rank
        has left."""
        for first in range(self.size):
            if words[row_of(first) + _RUN] > post.turns:
                break
        else:
            return False
        at = row_of(first) + ring_of(post.turns)
        there = tuple(words[at : at + 3])
        if post.can_fuse and post.graph == there:
            self._run(words, rank, post)
        elif post.begun + post.count > there[0]:
            self._leave(words, rank, post, there[2])
        elif post.can_fuse:
            self._decide(words, rank, PLAIN, PASSED_BY, first)
        return True

    def _leave(self, words: memoryview, rank: int, post: Vote, expected: int) -> None:
        """Others wait in vain inside of their graphs. All ranks hear of it, and go on as if none had run more."""
        words[_LEAVER], words[_CAME], words[_EXPECTED] = rank, post.signature, expected
        words[_SESSION] = 0
        words[_LEAVES] += 1
        words[_DIFFERED] = 1
        words[_GO_ON] = self._most(words)
        for each in range(self.size):
            if each == rank or words[row_of(each) + _ANSWER] == UNDECIDED:
                self._decide(words, each, PLAIN, LEFT, rank)

    @staticmethod
    def _post_of(words: memoryview, row: int) -> tuple[int, ...]:
        return tuple(words[row + _TURNS : row + _SIGNATURE + 1])

    def _meet(self, words: memoryview, rank: int, post: Vote, peer: int) -> None:
        """What the peer's last post says about this one, and the other way round."""
        row, own = row_of(peer), row_of(rank)
        if not words[row + _POSTS] or words[row + _ANSWER] == FUSED:
            return  # it has not come yet
        turns, begun, count, signature = self._post_of(words, row)
        undecided = words[row + _ANSWER] == UNDECIDED
        own_why = NOTHING
        if (turns, begun, count, signature) == (post.turns, *post.graph):
            return  # the answer to one is the answer to the other
        if turns != post.turns:
            return  # nor has one that is on its way to this turn
        if begun + count <= post.begun:
            if undecided:  # it waits where this rank has been without a post
                self._decide(words, peer, PLAIN, PASSED_BY, rank)
            return
        if post.begun + post.count <= begun:
            own_why = PASSED_BY
        else:
            own_why = ANOTHER_GRAPH
            if undecided:
                self._decide(words, peer, PLAIN, ANOTHER_GRAPH, rank)
        if words[own + _ANSWER] == UNDECIDED:
            self._decide(words, rank, PLAIN, own_why, peer)

    def _spread(self, words: memoryview) -> None:
        """Equal posts have the same answer."""
        rows = [row_of(r) for r in range(self.size) if words[row_of(r) + _POSTS]]
        plain = {self._post_of(words, r): r for r in rows if words[r + _ANSWER] == PLAIN}
        for row in rows if plain else ():
            source = plain.get(self._post_of(words, row))
            if source is not None and words[row + _ANSWER] == UNDECIDED:
                rank = (row - _HEADER) // _ROW
                self._decide(words, rank, PLAIN, words[source + _WHY], words[source + _PEER])

    def _missing(self, words: memoryview, post: Vote) -> int:
        mine = post[:4]
        for rank in range(self.size):
            row = row_of(rank)
            # Not here, or left again.
            if self._post_of(words, row) != mine or words[row + _ANSWER] != UNDECIDED:
                return rank
        return self.rank
