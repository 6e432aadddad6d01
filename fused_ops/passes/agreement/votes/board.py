"""Where the ranks of a group see which graph each is about to run: docs/protocol.md#votes-of-graphs has the rules.

Memory that rank 0 makes and the others find through the group's store when it is there (``board_file``): nobody waits
for its making. Every change is made under a lock of the file, so it is seen whole or not at all; but for what a rank
that does not ask writes into its own row (``known``), and for the word that ranks have differed, which is only ever
set. A rank posts a ``Vote`` and learns one of two answers. FUSED: every rank stands at the same place before a graph
with the same signature, and is willing. PLAIN: else, also where a rank has not come in time, or the lock cannot be had.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import ProcessGroup

from .....symm_mem import WeftError, forks, get_timeout
from .....symm_mem.heap.registry import has_name
from . import vote, vote_rows
from .board_file import BoardFile
from .board_store import WHAT, BoardStore
from .file_lock import backoff, lock, unlock
from .known import KnownGraphs

ABSENCE = 1.0  # seconds that a rank is waited for which has not voted since it was waited for in vain


class VoteBoard(BoardStore, vote_rows.VoteRows):
    """One rank's view of its group's board. Calls of several threads take turns."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self.connected = False  # the group's backend can be captured
        self._file = BoardFile(self.rank, self.size)
        self._own = vote_rows.row_of(self.rank)
        # Ranks that were waited for in vain, and how often they had voted by then.
        self._absent: dict[int, int] = {}
        self._shut = False  # the lock was waited for in vain, and has not been had since
        self._leaves = 0  # of which this rank has heard
        self._thread_lock = threading.Lock()
        self.known = KnownGraphs(self.rank, self.size, self._file, self._thread_lock)
        forks.tell(self)

    def forked(self) -> None:
        """This process is a child of the rank's, whose lock must not outlive it in a file that the child holds."""
        self._file.close()
        self.known.forget()

    @property
    def _words(self) -> memoryview | None:
        return self._file.words

    @property
    def turns(self) -> int:
        """As in ``Vote``."""
        words = self._file.words
        return 0 if words is None else words[self._own + vote_rows._RUN]

    def _make(self) -> None:
        """On rank 0; once more where an exception has ended it: others may have found the board."""
        self._set("where", json.dumps(self._file.make()))
        self._file.show()
        # After that: whoever leaves a note looks for the board once more, and posts if it is there by then.
        for peer in range(1, self.size):
            if (note := self._note(peer)) is None:
                continue
            with suppress(WeftError), self._lock(lambda: get_timeout(self._name)) as words:
                if not words[vote_rows.row_of(peer) + vote_rows._POSTS]:
                    self._post(words, peer, note)

    def attached(self) -> bool:
        """Whether the board is there and this rank can see it. If not: rank 0 makes it, the others look for it."""
        if self._words is not None:
            return True
        with self._thread_lock:
            if self._words is None:
                self._make() if self.rank == 0 else self._find()
        return self._words is not None

    def _find(self) -> None:
        if self._is_blind or not (found := self._peek("where")):
            return
        if (why := self._file.find(json.loads(found))) is not None:
            self._tell_blind(why)

    def _ended(self) -> int | None:
        """A rank whose process has ended: it does not vote any more."""
        return next((r for r in range(self.size) if r != self.rank and self._file.has_ended(r)), None)

    def told(self, rank: int) -> str | None:
        """What the signature that ``rank`` posted last stands for."""
        if self._words is None:
            return None
        return self.said(self._words[vote_rows.row_of(rank) + vote_rows._SIGNATURE])

    def _votes(self, rank: int) -> int:
        return 0 if self._words is None else self._words[vote_rows.row_of(rank) + vote_rows._POSTS]

    def absent(self) -> int | None:
        """A rank that has not voted since it was waited for in vain: it runs its program in eager mode, say."""
        for rank, votes in list(self._absent.items()):
            if self._votes(rank) == votes:
                return rank
            del self._absent[rank]
        return None

    def ask(self, post: vote.Vote, timeout: Callable[[], float]) -> vote.Answer:
        """Post, and wait for the answer, for ``timeout`` seconds at most. A rank that cannot fuse does not wait.

        For a rank that is ``absent`` the wait is short. That is safe whatever the others wait: FUSED takes the posts of
        all ranks, and who goes on alone has taken its own back.

        Raises:
            WeftError: the lock cannot be had to take the post back, so others may count on it; or there is no store.
        """
        patience = _Patience(self, post, timeout)
        if self._file.words is None and (answer := self._attach_or_give_up(post, patience)) is not None:
            return answer
        with self._thread_lock:
            try:
                answer = self._ask(post, patience)
            except BaseException:  # Ctrl-C, say: nobody shall count on this rank
                with suppress(WeftError), self._lock(timeout) as words:
                    self._take_back(words, vote.LATE, self.rank)
                raise
        return answer if answer.fused else self._noted(answer)

    def _noted(self, answer: vote.Answer) -> vote.Answer:
        if answer.why in (vote.LATE, vote.ABSENT, vote.NO_BOARD) and answer.peer != self.rank:
            self._absent.setdefault(answer.peer, self._votes(answer.peer))
        return answer

    def _attach_or_give_up(self, post: vote.Vote, patience: _Patience) -> vote.Answer | None:
        """None once the board is there."""
        noted = post.can_fuse
        while not self.attached():
            if not noted and not self._is_blind:
                self._leave_note(post)
                noted = True
                continue
            if patience.over() or self._is_blind:
                return self._noted(
                    vote.Answer(False, vote.NO_BOARD, 0)
                    if post.can_fuse
                    else vote.Answer(False, vote.CANNOT_FUSE, self.rank)
                )
            time.sleep(0.01)
        return None

    def _ask(self, post: vote.Vote, patience: _Patience) -> vote.Answer:
        answer = self._answer_to(post, patience)
        if answer.why == vote.LEFT:
            words = self._words
            assert words is not None
            self._leaves, words[self._own + vote_rows._RUN] = (
                words[vote_rows._LEAVES],
                words[vote_rows._GO_ON],
            )
        return answer

    def _answer_to(self, post: vote.Vote, patience: _Patience) -> vote.Answer:
        try:
            with self._lock(patience.timeout) as words:
                if words[vote_rows._LEAVES] != self._leaves:
                    return vote.Answer(False, vote.LEFT, words[vote_rows._LEAVER])
                turns = words[self._own + vote_rows._RUN]
                if post.turns < turns:  # another thread has run a graph meanwhile
                    post = post._replace(turns=turns)
                self._post(words, self.rank, post)
        except WeftError:
            if self._words is not None and self._most(self._words) > post.turns:
                raise  # others count on this rank
            # No rank has seen this post.
            return vote.Answer(False, vote.LOCKED if post.can_fuse else vote.CANNOT_FUSE, self.rank)
        answer = self._answer()
        return self._awaited(post, patience) if answer is None else answer

    def _awaited(self, post: vote.Vote, patience: _Patience) -> vote.Answer:
        waits = backoff()
        while (answer := self._answer()) is None:
            look = next(waits)
            in_vain = look and not self._all_see()
            ended = self._ended() if look else None
            gives_up = patience.over() or in_vain or ended is not None
            if gives_up or self._most(self._words) > post.turns:  # type: ignore[arg-type]
                with self._lock(patience.timeout) as words:
                    if words[self._own + vote_rows._ANSWER] != vote.UNDECIDED or self._follow(
                        words, self.rank, post
                    ):
                        continue  # one that does not ask has come meanwhile
                    if not gives_up:
                        continue
                    absent = self.absent()
                    late = (
                        (vote.LATE, self._missing(words, post)) if absent is None else (vote.ABSENT, absent)
                    )
                    late = late if ended is None else (vote.ENDED, ended)
                    why = late if self._blind is None or not in_vain else (vote.NO_BOARD, self._blind[0])
                    self._take_back(words, *why)
        return answer

    def left(self) -> tuple[int, str | None, str | None]:
        """The rank that has left, what it came with, and what others ran there."""
        assert self._words is not None
        came, expected = (self.said(self._words[at]) for at in (vote_rows._CAME, vote_rows._EXPECTED))
        return self._words[vote_rows._LEAVER], came, expected

    def notes_session(self, session: int) -> bool:
        """Which session the group's heap has when a rank leaves; whether it is the one that the rank found."""
        assert self._words is not None
        if self._words[vote_rows._LEAVER] == self.rank:
            self._words[vote_rows._SESSION] = session
        return self._words[vote_rows._SESSION] in (0, session)

    def _take_back(self, words: memoryview, why: int, peer: int) -> None:
        """This rank's post, unless there is an answer to it."""
        if words[self._own + vote_rows._ANSWER] == vote.UNDECIDED:
            self._decide(words, self.rank, vote.PLAIN, why, peer)
            self._spread(words)

    def came_after_all(self, peer: int, post: vote.Vote) -> bool | None:
        """Whether ``peer``, for which this rank once waited in vain, has posted the same since; None: not known yet.

        If it has not, the ranks have run different graphs, which the board then says: a word that is only ever set."""
        words = self._words
        if words is None:
            return None
        row = vote_rows.row_of(peer)
        if post.digest in words[row + vote_rows._HISTORY : row + vote_rows._RING].tolist():
            return True
        if not words[row + vote_rows._POSTS] or (
            words[row + vote_rows._TURNS],
            words[row + vote_rows._BEGUN],
        ) <= (post.turns, post.begun):
            return None
        words[vote_rows._DIFFERED] = 1
        return False

    def _lock(self, timeout: Callable[[], float]) -> _BoardLock:
        """A context with the words, for this rank alone. The kernel gives the lock back once no process has the
        holder's file open. WeftError: another rank's process has held it all the time, or a child that C code has
        forked from it."""
        self._owner.refuse_child(WHAT)
        return _BoardLock(self, timeout)

    def _begin(self, timeout: Callable[[], float]) -> memoryview:
        assert self._words is not None
        limit = (lambda: 0.0) if self._shut else timeout  # whoever has waited in vain does not wait again
        waited = lock(self._file.fd, limit)
        self._shut = waited is not None
        if self._shut:
            raise WeftError(
                f"{WHAT}: rank {self.rank} of group {self._name!r} waited {waited:g} s for the lock of the ranks' "
                "board, which rank 0 keeps: it is held, expected free"
            )
        return self._words

    def _answer(self) -> vote.Answer | None:
        words, row = self._file.words, self._own
        assert words is not None
        answer = words[row + vote_rows._ANSWER]
        if answer == vote.UNDECIDED:
            return None
        return vote.Answer(answer == vote.FUSED, words[row + vote_rows._WHY], words[row + vote_rows._PEER])


class _Patience:
    """How long a rank waits; its clock begins when it is first asked: most often the others are there at once."""

    def __init__(self, board: VoteBoard, post: vote.Vote, timeout: Callable[[], float]) -> None:
        self._board, self._can_fuse, self.timeout = board, post.can_fuse, timeout
        self._begin = self._longest = -1.0

    def over(self) -> bool:
        if self._longest < 0:
            self._begin, self._longest = time.monotonic(), self.timeout() if self._can_fuse else 0.0
        limit = self._longest if self._board.absent() is None else min(self._longest, ABSENCE)
        return time.monotonic() >= self._begin + limit


class _BoardLock:
    """Not a generator: it stands before each graph."""

    __slots__ = ("_board", "_timeout")

    def __init__(self, board: VoteBoard, timeout: Callable[[], float]) -> None:
        self._board, self._timeout = board, timeout

    def __enter__(self) -> memoryview:
        try:
            return self._board._begin(self._timeout)
        except BaseException:
            # Ctrl-C may have come just after the lock. Who does not have it gives nothing back.
            unlock(self._board._file.fd)
            raise

    def __exit__(self, *of_the_body: object) -> None:
        unlock(self._board._file.fd)


_boards: weakref.WeakKeyDictionary[ProcessGroup, VoteBoard] = weakref.WeakKeyDictionary()
_making: dict[int, threading.Lock] = {}  # by process: in a forked child the threads are gone that held one


def vote_board(group: ProcessGroup) -> VoteBoard:
    """The group's board, as this rank sees it. ForkedProcess: this process was forked from the one that joined the
    group."""
    forks.refuse_child(group, WHAT)
    known = _boards.get(group)
    if known is None:
        with _making.setdefault(forks.pid, threading.Lock()):
            known = _boards.get(group)
            if known is None:
                for other in list(_boards):  # a program may keep a group that it has destroyed
                    if not has_name(other, other.group_name):
                        del _boards[other]
                known = _boards[group] = VoteBoard(group)
    return known
