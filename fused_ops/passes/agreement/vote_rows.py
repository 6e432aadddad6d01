"""The rows of a vote board: what each rank posted last, and the answer that follows from it."""

from __future__ import annotations

from .vote import ANOTHER_GRAPH, CANNOT_FUSE, FUSED, NOTHING, PASSED_BY, PLAIN, UNDECIDED, Vote

# A rank's words: its post (from which a count of 1 on there is one), the answer, and digests of its last posts.
_TURNS, _BEGUN, _COUNT, _SIGNATURE, _CAN_FUSE, _ANSWER, _WHY, _PEER, _POSTS = range(9)
_PRESENT = 9  # 1 once the rank has shown its presence
_HISTORY, _KEPT = 16, 112
_ROW = _HISTORY + _KEPT
_HEADER = 16  # words, the first four hold the board's secret
_FUSED_RUNS = 4  # the word of ``turns``: the ranks', so that one who is interrupted while it asks has it, too


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

    def _post(self, words: memoryview, rank: int, post: Vote) -> None:
        row = self._row(rank)
        mine = (post.turns, post.begun, post.count, post.signature)
        words[row + _ANSWER] = UNDECIDED
        words[row + _TURNS], words[row + _BEGUN], words[row + _COUNT], words[row + _SIGNATURE] = mine
        words[row + _CAN_FUSE] = int(post.can_fuse)
        words[row + _HISTORY + words[row + _POSTS] % _KEPT] = post.digest
        words[row + _POSTS] += 1
        if not post.can_fuse:
            self._decide(words, rank, PLAIN, CANNOT_FUSE, rank)
        for peer in range(self.size):
            if peer != rank:
                self._meet(words, rank, post, peer)
        self._spread(words)
        rows = [self._row(r) for r in range(self.size)]
        if all(words[r + _ANSWER] == UNDECIDED and self._post_of(words, r) == mine for r in rows):
            words[_FUSED_RUNS] += 1
            for each in range(self.size):
                self._decide(words, each, FUSED, NOTHING, each)

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
        if (turns, begun, count, signature) == (post.turns, post.begun, post.count, post.signature):
            return  # the answer to one is the answer to the other
        if turns == post.turns and begun + count <= post.begun:
            if undecided:  # it waits where this rank has been without a post
                self._decide(words, peer, PLAIN, PASSED_BY, rank)
            return
        if turns == post.turns and post.begun + post.count <= begun:
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
        for row in rows:
            source = plain.get(self._post_of(words, row))
            if source is not None and words[row + _ANSWER] == UNDECIDED:
                rank = (row - _HEADER) // _ROW
                self._decide(words, rank, PLAIN, words[source + _WHY], words[source + _PEER])

    def _missing(self, words: memoryview, post: Vote) -> int:
        mine = (post.turns, post.begun, post.count, post.signature)
        for rank in range(self.size):
            row = self._row(rank)
            # Not here, or left again.
            if self._post_of(words, row) != mine or words[row + _ANSWER] != UNDECIDED:
                return rank
        return self.rank
