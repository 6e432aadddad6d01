"""Where the ranks of a group see which graph each is about to run: docs/protocol.md#votes-of-graphs has the rules.

Every change is made under a lock of the file, so it is seen whole or not at all; but for what a rank that does not ask
writes into its own row (``known``). A rank posts a ``Vote`` and learns one of two answers. FUSED: every rank stands at
the same place before a graph with the same signature, and is willing. PLAIN: else, also where a rank has not come in
time.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch.distributed import ProcessGroup, Store

from .....symm_mem import WeftError, forks, get_timeout
from .....symm_mem.bootstrap.store import GroupStore, StoreQuestions, peek, restart_count
from .....symm_mem.heap.registry import has_name
from . import vote_rows as rows
from .board_file import BoardFile, backoff, lock, unlock
from .known import KnownGraphs

WHAT = "agree on a graph"  # in errors
_TOLD = 4096  # signatures of which a rank tells the others what they stand for: each is an entry in the store
ABSENCE = 1.0  # seconds that a rank is waited for which has not voted since it was waited for in vain
T = TypeVar("T")


class VoteBoard(rows.VoteRows):
    """One rank's view of its group's board. Calls of several threads take turns.

    Attributes:
        blind: a rank that will never see the board, as far as this one knows, and why.
        connected: whether the group's backend can be captured.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._owner = forks.Owner(group)
        self.rank, self.size, self._name = group.rank(), group.size(), group.group_name
        self._store = GroupStore(group)
        # A store may outlive a group of this name: each rank counts those that had a board, so that keys are new. A
        # rank that died before it had one has counted less: the counts begin anew with the ranks.
        keys = f"weft/{self._name}/agree/{restart_count()}"
        self._prefix = f"{keys}/{self._asked(lambda s: s.add(f'{keys}/made/{self.rank}', 1))}"
        self.blind: tuple[int, str] | None = None
        self.connected = False
        self._file = BoardFile(self.rank, self.size)
        self._own = rows.row_of(self.rank)
        # Ranks that were waited for in vain, and how often they had voted by then.
        self._absent: dict[int, int] = {}
        self._told: set[int] = set()
        self._leaves = 0  # of which this rank has heard
        self._thread_lock = threading.Lock()
        self.known = KnownGraphs(self.rank, self.size, self._file, self._thread_lock)
        forks.tell(self)

    def forked(self) -> None:
        """This process is a child of the rank's, whose lock must not outlive it in a file that the child holds."""
        self._file.close()
        self.known.forget()

    def _asked(self, question: Callable[[Store], T]) -> T:
        self._owner.refuse_child(WHAT)
        with StoreQuestions(self._store.get(WHAT), WHAT, self._name, self.rank) as store:
            store.limit(get_timeout(self._name))
            return store.ask(question)

    def _peek(self, key: str) -> str:
        return self._asked(lambda s: peek(s, f"{self._prefix}/{key}"))

    def tell(self, signature: int, what: list[str]) -> None:
        """Lets the others know, once, what a signature of this rank stands for."""
        if signature not in self._told and len(self._told) < _TOLD:
            self._asked(lambda s: s.set(f"{self._prefix}/graph/{signature}", json.dumps(what)))
            self._told.add(signature)

    def _said(self, signature: int) -> list[str] | None:
        found = self._peek(f"graph/{signature}")
        return json.loads(found) if found else None

    def told(self, rank: int) -> list[str] | None:
        """What the signature that ``rank`` posted last stands for; None if it has not said so."""
        words = self._file.words
        return None if words is None else self._said(words[rows.row_of(rank) + rows._SIGNATURE])

    def attached(self) -> bool:
        """Whether this rank can see the board, which it makes if it is the first."""
        if self._file.words is None:
            with self._thread_lock:
                if self._file.words is None and (self.blind or (-1,))[0] != self.rank:
                    self._attach()
        return self._file.words is not None

    def _attach(self) -> None:
        key = f"{self._prefix}/where"
        if not (where := self._peek("where")):
            mine = json.dumps(self._file.offer())
            where = self._asked(lambda s: s.compare_set(key, "", mine).decode())
        if (why := self._file.find(json.loads(where))) is not None:
            self.blind = self.rank, why
            self._asked(lambda s: s.set(f"{self._prefix}/blind", json.dumps(self.blind)))

    def _sees_blind(self) -> bool:
        """Whether a rank is known that cannot see the board: one of another host, say."""
        if self.blind is None and (found := self._peek("blind")):
            rank, why = json.loads(found)
            self.blind = rank, why
        return self.blind is not None

    @property
    def _words(self) -> memoryview:
        assert self._file.words is not None
        return self._file.words

    def _votes(self, rank: int) -> int:
        words = self._file.words
        return 0 if words is None else words[rows.row_of(rank) + rows._POSTS]

    def absent(self) -> int | None:
        """A rank that has not voted since it was waited for in vain: it runs its program in eager mode, say."""
        for rank, votes in list(self._absent.items()):
            if self._votes(rank) == votes:
                return rank
            del self._absent[rank]
        return None

    def ask(self, post: rows.Vote, timeout: float) -> rows.Answer:
        """Post, and wait for the answer, for ``timeout`` seconds at most. A rank that cannot fuse does not wait.

        For a rank that is ``absent`` the wait is short. That is safe whatever the others wait: FUSED takes the posts of
        all ranks, and who goes on alone has taken its own back.

        Raises:
            WeftError: another rank's process holds the lock until the group's deadline; or there is no store.
        """
        if not self.attached():
            return rows.Answer(False, rows.NO_BOARD if post.can_fuse else rows.CANNOT_FUSE, self.rank)
        with self._thread_lock:
            try:
                answer = self._ask(post, timeout)
            except BaseException:  # Ctrl-C, say: nobody shall count on this rank
                with suppress(WeftError), self._lock(ABSENCE) as words:
                    self._take_back(words, rows.LATE, self.rank)
                raise
        if answer.why in (rows.LATE, rows.ABSENT) and answer.peer != self.rank:
            self._absent.setdefault(answer.peer, self._votes(answer.peer))
        return answer

    def _ask(self, post: rows.Vote, timeout: float) -> rows.Answer:
        with self._lock(get_timeout(self._name)) as words:
            if words[rows._LEAVES] == self._leaves:
                self._post(words, post)
            else:
                self._decide(words, self.rank, rows.LEFT, words[rows._LEAVER])
        answer = self._answer() or self._awaited(post, timeout)
        if answer.why == rows.LEFT:
            self._leaves = words[rows._LEAVES]
            words[self._own + rows._RUN] = words[rows._GO_ON]
        return answer

    def _awaited(self, post: rows.Vote, timeout: float) -> rows.Answer:
        waits, begin = backoff(), time.monotonic()
        while (answer := self._answer()) is None:
            in_vain = None
            if next(waits):
                ended = next(
                    (r for r in range(self.size) if r != self.rank and self._file.has_ended(r)), None
                )
                if ended is not None:
                    in_vain = rows.ENDED, ended
                elif self._sees_blind():
                    in_vain = rows.NO_BOARD, self.blind[0]  # type: ignore[index]
            absent = self.absent()
            limit = timeout if absent is None else min(timeout, ABSENCE)
            late = time.monotonic() >= begin + limit
            words = self._words
            if not late and in_vain is None and self._most(words) == words[self._own + rows._RUN]:
                continue
            with self._lock(get_timeout(self._name)):
                # One that does not ask may have come meanwhile.
                if self._answer() is None and not self._follow(words, post) and (late or in_vain):
                    why = (rows.LATE, self._missing(words)) if absent is None else (rows.ABSENT, absent)
                    return self._take_back(words, *(in_vain or why))
        return answer

    def _take_back(self, words: memoryview, why: int, peer: int) -> rows.Answer:
        """This rank's post, unless there is an answer to it."""
        if words[self._own + rows._ANSWER] == rows.UNDECIDED:
            self._decide(words, self.rank, why, peer)
            self._spread(words)
        return rows.Answer(False, why, peer)

    def _answer(self) -> rows.Answer | None:
        words, row = self._words, self._own
        answer = words[row + rows._ANSWER]
        if answer == rows.UNDECIDED:
            return None
        return rows.Answer(answer == rows.FUSED, words[row + rows._WHY], words[row + rows._PEER])

    @property
    def numbers_differ(self) -> bool:
        """Whether the last rank to leave came with other numbers."""
        return not self._words[rows._EXPECTED]

    def left(self) -> tuple[int, list[str] | None, list[str] | None]:
        """The rank that has left, what it came with, and what others ran there."""
        words = self._words
        came, expected = self._said(words[rows._CAME]), self._said(words[rows._EXPECTED])
        return words[rows._LEAVER], came, expected

    def notes_session(self, session: int) -> bool:
        """Which session the group's heap has when a rank leaves; whether it is the one that the rank found."""
        words = self._words
        if words[rows._LEAVER] == self.rank:
            words[rows._SESSION] = session
        return words[rows._SESSION] in (0, session)

    @contextmanager
    def _lock(self, timeout: float) -> Iterator[memoryview]:
        """The words, for this rank alone. The kernel gives the lock back once no process has the holder's file open.
        WeftError: another rank's process has held it all the time, or a child that C code has forked from it."""
        self._owner.refuse_child(WHAT)
        words = self._words
        try:
            if not lock(self._file.fd, timeout):
                raise WeftError(
                    f"{WHAT}: rank {self.rank} of group {self._name!r} waited {timeout:g} s for the lock of the ranks' "
                    "board: it is held, expected free"
                )
            yield words
        finally:  # Ctrl-C may have come just after the lock; who does not have it gives nothing back
            unlock(self._file.fd)


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
