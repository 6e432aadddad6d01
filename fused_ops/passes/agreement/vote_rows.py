"""The rows of a vote board: what each rank posted last, and the answer that follows from it.

Ranks that have agreed often enough need not meet before each graph. One may run the graph that it foresees ahead of the
others; then that graph stands on the board, by the number of the run (its turn), and the others compare theirs with it
when they come there. Whoever comes with another one has left: nobody can take back what runs already.
"""

from __future__ import annotations

from . import foresight
from .vote import AHEAD, ANOTHER_GRAPH, CANNOT_FUSE, FUSED, LEFT, NOTHING, PASSED_BY, PLAIN, UNDECIDED, Vote

# A rank's words: its post (from which a count of 1 on there is one), the answer, and digests of its last posts.
_TURNS, _BEGUN, _COUNT, _SIGNATURE, _CAN_FUSE, _ANSWER, _WHY, _PEER, _POSTS = range(9)
_PRESENT = 9  # 1 once the rank has shown its presence
_RUN = 10  # graphs that it has run fused: here, so that one who is interrupted while it asks has it, too
_AHEAD = 11  # 1: as in its last ``Vote``
_HISTORY, _KEPT = 16, 112
_ROW = _HISTORY + _KEPT

_SECRET = 4  # words in front of all
# Graphs that any rank has run fused. Those before which all ranks met and agreed, since one last differed; how many it
# takes until they run ahead; the turn, plus 1, in which one differed last.
_MOST, _AGREED, _NEEDED, _DIFFERED = range(_SECRET, _SECRET + 4)
# How often a rank has left; the last one, what it came with, what had run there, and which heap's session that was.
_LEAVES, _LEAVER, _CAME, _EXPECTED, _SESSION = range(_DIFFERED + 1, _DIFFERED + 6)
_RING, _TURNS_KEPT = 16, 128  # the graphs of the last turns
_HEADER = _RING + 3 * _TURNS_KEPT

_NEVER = 1 << 40


class VoteRows:
    """The rules by which posts become answers. Whoever calls them has the board's lock."""

    rank: int
    size: int

    def _row(self, rank: int) -> int:
        return _HEADER + rank * _ROW

    def _decide(self, words: memoryview, rank: int, answer: int, why: int, peer: int) -> None:
        row = self._row(rank)
        words[row + _WHY], words[row + _PEER] = why, peer
        words[row + _ANSWER] = answer
        if answer == PLAIN and words[row + _CAN_FUSE] and words[_DIFFERED] != words[row + _TURNS] + 1:
            words[_DIFFERED] = words[row + _TURNS] + 1
            words[_AGREED], words[_NEEDED] = 0, min(2 * (words[_NEEDED] or foresight.LIMITS.trusted), _NEVER)

    def _post(self, words: memoryview, rank: int, post: Vote, foreseen: bool = False) -> None:
        """``foreseen``: this rank need not wait for the others if they all allow that."""
        row = self._row(rank)
        words[row + _ANSWER] = UNDECIDED
        words[row + _TURNS], words[row + _BEGUN], words[row + _COUNT], words[row + _SIGNATURE] = post[:4]
        words[row + _CAN_FUSE], words[row + _AHEAD] = int(post.can_fuse), int(post.ahead)
        posts = words[row + _POSTS]
        words[row + _HISTORY + posts % _KEPT] = post.digest
        words[row + _POSTS] = posts + 1
        if not post.can_fuse:
            self._decide(words, rank, PLAIN, CANNOT_FUSE, rank)
        if words[_MOST] > post.turns:
            self._follow(words, rank, post)
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
                self._run(words, each, post, NOTHING)
        elif foreseen and words[row + _ANSWER] == UNDECIDED and self._may_go_ahead(words, rank, post):
            self._run(words, rank, post, AHEAD)

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

    def _run(self, words: memoryview, rank: int, post: Vote, why: int) -> None:
        """The rank runs its graph fused, in this turn."""
        at = _RING + 3 * (post.turns % _TURNS_KEPT)
        words[at], words[at + 1], words[at + 2] = post.graph
        words[_MOST] = max(words[_MOST], post.turns + 1)
        words[self._row(rank) + _RUN] = post.turns + 1
        self._decide(words, rank, FUSED, why, rank)

    def _may_go_ahead(self, words: memoryview, rank: int, post: Vote) -> bool:
        if words[_AGREED] < (words[_NEEDED] or foresight.LIMITS.trusted):
            return False
        rows = [self._row(r) for r in range(self.size) if r != rank]
        # One that waits has not foreseen what this rank has: let them meet.
        farthest = foresight.LIMITS.farthest
        return all(
            words[r + _AHEAD] and words[r + _ANSWER] != UNDECIDED and post.turns - words[r + _RUN] < farthest
            for r in rows
        )

    def _follow(self, words: memoryview, rank: int, post: Vote) -> None:
        """Others run this turn's graph fused, or have run it: it is this one, or comes later, or this rank has left."""
        at = _RING + 3 * (post.turns % _TURNS_KEPT)
        there = tuple(words[at : at + 3])
        runs = [r for r in range(self.size) if words[self._row(r) + _RUN] > post.turns]
        if post.can_fuse and post.graph == there:
            self._run(words, rank, post, NOTHING)
        elif post.begun + post.count > there[0]:
            self._leave(words, rank, post, there[2])
        elif post.can_fuse:
            self._decide(words, rank, PLAIN, PASSED_BY, runs[0])

    def _leave(self, words: memoryview, rank: int, post: Vote, expected: int) -> None:
        """Others wait in vain inside of their graphs. All ranks hear of it, and go on as if none had run more."""
        words[_LEAVER], words[_CAME], words[_EXPECTED] = rank, post.signature, expected
        words[_SESSION] = 0
        words[_LEAVES] += 1
        words[_AGREED], words[_NEEDED] = 0, _NEVER
        for each in range(self.size):
            row = self._row(each)
            words[row + _RUN] = words[_MOST]
            if each == rank or words[row + _ANSWER] == UNDECIDED:
                self._decide(words, each, PLAIN, LEFT, rank)

    @staticmethod
    def _post_of(words: memoryview, row: int) -> tuple[int, ...]:
        return tuple(words[row + _TURNS : row + _SIGNATURE + 1])

    def _meet(self, words: memoryview, rank: int, post: Vote, peer: int) -> None:
        """What the peer's last post says about this one, and the other way round."""
        row, own = self._row(peer), self._row(rank)
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
        rows = [self._row(r) for r in range(self.size) if words[self._row(r) + _POSTS]]
        plain = {self._post_of(words, r): r for r in rows if words[r + _ANSWER] == PLAIN}
        for row in rows if plain else ():
            source = plain.get(self._post_of(words, row))
            if source is not None and words[row + _ANSWER] == UNDECIDED:
                rank = (row - _HEADER) // _ROW
                self._decide(words, rank, PLAIN, words[source + _WHY], words[source + _PEER])

    def _missing(self, words: memoryview, post: Vote) -> int:
        mine = post[:4]
        for rank in range(self.size):
            row = self._row(rank)
            # Not here, or left again.
            if self._post_of(words, row) != mine or words[row + _ANSWER] != UNDECIDED:
                return rank
        return self.rank
