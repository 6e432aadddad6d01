"""Where the ranks of a group see which graph each is about to run.

One page of memory that rank 0 makes and the others find through the group's store when it is there (``board_file``):
nobody waits for its making. Every change is made under a lock of the file, so it is seen whole or not at all. A rank's
place in the program is told by two counts that are the same on all ranks wherever these are at the same point, because
neither needs weft on the other side: how many collectives its backend has begun in the group, and how many graphs the
group has run fused. A rank posts a ``Vote`` and learns one of two answers:

======  ====================================================================================================
FUSED   every rank of the group stands at the same place before a graph with the same signature, and is willing
PLAIN   else: another rank posted another graph for these collectives, is past them without having posted, is not
        willing, has not come in time or has ended; or the lock cannot be had, then nothing is posted
======  ====================================================================================================

FUSED is written for all ranks at once by the last one to post, and only over posts that no rank has withdrawn; PLAIN
for a rank by itself or by whoever sees the conflict. So ranks at one place never get different answers, however late
one is.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from torch.distributed import ProcessGroup, Store

from ....symm_mem import WeftError, forks, get_timeout
from ....symm_mem.bootstrap.processes import has_ended, identity
from ....symm_mem.bootstrap.store import GroupStore, StoreQuestions, peek
from ....symm_mem.heap.registry import has_name
from .board_file import BoardFile
from .file_lock import locked, pauses
from .vote import ABSENT, CANNOT_FUSE, ENDED, FUSED, LATE, LOCKED, NO_BOARD, PLAIN, UNDECIDED, Answer, Vote
from .vote_rows import (
    _ANSWER,
    _BEGUN,
    _FUSED_RUNS,
    _HISTORY,
    _KEPT,
    _PEER,
    _POSTS,
    _ROW,
    _SIGNATURE,
    _TURNS,
    _WHY,
    VoteRows,
)

__all__ = ["_KEPT", "VoteBoard", "vote_board"]
ABSENCE = 1.0  # seconds that a rank is waited for which has not voted since it was waited for in vain
_WHAT = "agree on a graph"  # in errors

T = TypeVar("T")


class VoteBoard(VoteRows):
    """One rank's view of its group's board. Calls of several threads take turns."""

    def __init__(self, group: ProcessGroup) -> None:
        self._owner = forks.Owner(group)
        self.rank, self.size = group.rank(), group.size()
        self.connected = False  # the group's backend can be captured
        self._name = group.group_name
        self._store = GroupStore(group)
        self._prefix = self._new_prefix(_tokens.setdefault(group, secrets.token_hex(8)))
        self._file = BoardFile(self.rank, self.size)
        self._blind: tuple[int, str] | None = None  # a rank that will never see the board, and why
        self._processes: dict[int, dict[str, Any] | None] = {}  # the other ranks', once they are known
        # Ranks that were waited for in vain, and how often they had voted by then.
        self._absent: dict[int, int] = {}
        self._shut = False  # the lock was waited for in vain, and has not been had since
        self._thread_lock = threading.Lock()
        forks.tell(self)

    def forked(self) -> None:
        """This process is a child of the rank's, whose lock must not outlive it in a file that the child holds."""
        self._file.close()

    @property
    def _words(self) -> memoryview | None:
        return self._file.words

    @property
    def turns(self) -> int:
        """As in ``Vote``."""
        return 0 if self._words is None else self._words[_FUSED_RUNS]

    def _new_prefix(self, token: str) -> str:
        """A store may outlive a group of this name: each rank counts those that had a board, so that keys are new.

        ``token``: the group's, which is counted once, however often an exception has ended the making of its board.
        """
        prefix = f"weft/{self._name}/agree"
        key = f"{prefix}/made/{self.rank}"

        def count(store: Store) -> str:
            number, _, last = peek(store, key).partition(" ")
            if last != token:
                number = str(int(number or 0) + 1)
                store.set(key, f"{number} {token}")
            store.set(f"{prefix}/{number}/process/{self.rank}", json.dumps(_process()))
            return number

        return f"{prefix}/{self._asked(count)}"

    def _make(self) -> None:
        """On rank 0; once more where an exception has ended it: others may have found the board."""
        where = self._file.make()
        self._asked(lambda s: s.set(f"{self._prefix}/where", json.dumps(where)))
        self._file.show()
        # Behind that: whoever leaves a note looks for the board once more, and posts if it is there by then.
        for peer in range(1, self.size):
            key = self._note(peer)
            if not (note := self._asked(lambda s, key=key: peek(s, key))):  # type: ignore[misc]
                continue
            with suppress(WeftError), self._lock(lambda: get_timeout(self._name)) as words:
                if not words[self._row(peer) + _POSTS]:
                    self._post(words, peer, Vote(**json.loads(note)))

    def _note(self, rank: int) -> str:
        """Where a rank that waits for nobody leaves its post while there is no board, or it would be waited for."""
        return f"{self._prefix}/note/{rank}"

    def _leave_note(self, post: Vote) -> None:
        self._asked(lambda s: s.set(self._note(self.rank), json.dumps(asdict(post))))

    def attached(self) -> bool:
        """Whether the board is there and this rank can see it. If not: rank 0 makes it, the others look for it."""
        if self._words is not None:
            return True
        with self._thread_lock:
            if self._words is None:
                self._make() if self.rank == 0 else self._find()
        return self._words is not None

    def _find(self) -> None:
        if self._blind is not None and self._blind[0] == self.rank:
            return
        if not (found := self._asked(lambda s: peek(s, f"{self._prefix}/where"))):
            return
        if (why := self._file.find(json.loads(found))) is not None:
            self._asked(lambda s: s.set(f"{self._prefix}/blind", json.dumps([self.rank, why])))
            self._blind = self.rank, why

    @property
    def blind(self) -> tuple[int, str] | None:
        """A rank that cannot open the board, as far as this one knows, and why."""
        return self._blind

    def _all_see(self) -> bool:
        """Whether no rank is known that cannot see the board: one of another host, say."""
        if self._blind is None and (found := self._asked(lambda s: peek(s, f"{self._prefix}/blind"))):
            rank, why = json.loads(found)
            self._blind = rank, why
        return self._blind is None

    def _ended(self) -> int | None:
        """A rank whose process has ended: it does not vote any more."""
        unknown = [r for r in range(self.size) if r != self.rank and r not in self._processes]
        if unknown:
            keys = {rank: f"{self._prefix}/process/{rank}" for rank in unknown}
            found = self._asked(lambda s: {rank: peek(s, key) for rank, key in keys.items()})
            self._processes.update((rank, json.loads(text)) for rank, text in found.items() if text)
        return next((r for r in range(self.size) if r != self.rank and self._has_ended(r)), None)

    def _has_ended(self, rank: int) -> bool:
        return has_ended(self._processes.get(rank)) or self._file.has_ended(rank)

    def _asked(self, question: Callable[[Store], T]) -> T:
        self._owner.refuse_child(_WHAT)
        with StoreQuestions(self._store.get(_WHAT), _WHAT, self._name, self.rank) as store:
            store.limit(get_timeout(self._name))
            return store.ask(question)

    def tell(self, signature: int, text: str) -> None:
        """Let the others know what stands behind a signature of this rank."""
        self._asked(lambda s: s.set(f"{self._prefix}/graph/{signature}", text))

    def told(self, rank: int) -> str | None:
        """What stands behind the signature that ``rank`` posted last."""
        if self._words is None:
            return None
        key = f"{self._prefix}/graph/{self._words[self._row(rank) + _SIGNATURE]}"
        return self._asked(lambda s: peek(s, key)) or None

    def _votes(self, rank: int) -> int:
        return 0 if self._words is None else self._words[self._row(rank) + _POSTS]

    def absent(self) -> int | None:
        """A rank that has not voted since it was waited for in vain: it runs its program in eager mode, say."""
        for rank, votes in list(self._absent.items()):
            if self._votes(rank) == votes:
                return rank
            del self._absent[rank]
        return None

    def ask(self, post: Vote, timeout: Callable[[], float]) -> Answer:
        """Post, and wait for the answer, for ``timeout`` seconds at most. A rank that cannot fuse does not wait.

        For a rank that is ``absent`` the wait is short. That is safe whatever the others wait: FUSED takes the posts of
        all ranks, and who goes on alone has taken its own back.

        Raises:
            WeftError: the lock cannot be had to take the post back, so others may count on it; or there is no store.
        """
        answer = self._asked_for(post, timeout)
        if answer.why in (LATE, ABSENT, NO_BOARD) and answer.peer != self.rank:
            self._absent.setdefault(answer.peer, self._votes(answer.peer))
        return answer

    def _asked_for(self, post: Vote, timeout: Callable[[], float]) -> Answer:
        begin, longest = 0.0, -1.0

        def over() -> bool:
            nonlocal begin, longest
            if longest < 0:  # asked for only now: most often the others are there at once
                begin, longest = time.monotonic(), timeout() if post.can_fuse else 0.0
            limit = longest if self.absent() is None else min(longest, ABSENCE)
            return time.monotonic() >= begin + limit

        noted = post.can_fuse
        while not self.attached():
            blind = self._blind is not None and self._blind[0] == self.rank
            if not noted and not blind:
                self._leave_note(post)
                noted = True
                continue
            if post.can_fuse and (ended := self._ended()) is not None:
                return Answer(False, ENDED, ended)
            if over() or blind:
                return Answer(False, NO_BOARD, 0) if post.can_fuse else Answer(False, CANNOT_FUSE, self.rank)
            time.sleep(0.01)
        with self._thread_lock:
            try:
                return self._ask(post, over, timeout)
            except BaseException:  # Ctrl-C, say: nobody shall count on this rank
                with suppress(WeftError), self._lock(timeout) as words:
                    self._take_back(words, LATE, self.rank)
                raise

    def _ask(self, post: Vote, over: Callable[[], bool], timeout: Callable[[], float]) -> Answer:
        try:
            with self._lock(timeout) as words:
                self._post(words, self.rank, post)
        except WeftError:  # no rank has seen this post, so none counts on it
            return Answer(False, LOCKED if post.can_fuse else CANNOT_FUSE, self.rank)
        waits = pauses()
        while (answer := self._answer()) is None:
            pause = next(waits)
            in_vain = pause is None and not self._all_see()
            ended = self._ended() if pause is None else None
            if over() or in_vain or ended is not None:
                with self._lock(timeout) as words:
                    absent = self.absent()
                    late = (LATE, self._missing(words, post)) if absent is None else (ABSENT, absent)
                    late = late if ended is None else (ENDED, ended)
                    why = late if self._blind is None or not in_vain else (NO_BOARD, self._blind[0])
                    self._take_back(words, *why)
            else:
                time.sleep(pause or 0.0)
        return answer

    def _take_back(self, words: memoryview, why: int, peer: int) -> None:
        """This rank's post, unless there is an answer to it."""
        if words[self._row(self.rank) + _ANSWER] == UNDECIDED:
            self._decide(words, self.rank, PLAIN, why, peer)
            self._spread(words)

    def came_after_all(self, peer: int, post: Vote) -> bool | None:
        """Whether ``peer``, for which this rank once waited in vain, has posted the same since; None: not known yet."""
        words = self._words
        if words is None:
            return None
        row = self._row(peer)
        if post.digest in words[row + _HISTORY : row + _ROW].tolist():
            return True
        past = words[row + _POSTS] and (words[row + _TURNS], words[row + _BEGUN]) > (post.turns, post.begun)
        return False if past else None

    @contextmanager
    def _lock(self, timeout: Callable[[], float]) -> Iterator[memoryview]:
        """The words, for this rank alone. The kernel gives the lock back once no process has the holder's file open.

        Raises:
            WeftError: another rank's process has held it all the time, or a child that C code has forked from it.
        """
        self._owner.refuse_child(_WHAT)
        assert self._words is not None
        limit = (lambda: 0.0) if self._shut else timeout  # whoever has waited in vain does not wait again
        with locked(self._file.fd, limit) as waited:
            self._shut = waited is not None
            if self._shut:
                raise WeftError(
                    f"{_WHAT}: rank {self.rank} of group {self._name!r} waited {waited:g} s for the lock of the ranks' "
                    "board, which rank 0 keeps: it is held, expected free"
                )
            yield self._words

    def _answer(self) -> Answer | None:
        assert self._words is not None
        row = self._row(self.rank)
        answer = self._words[row + _ANSWER]
        if answer == UNDECIDED:
            return None
        return Answer(answer == FUSED, self._words[row + _WHY], self._words[row + _PEER])


def _process() -> dict[str, Any] | None:
    try:
        return identity()
    except OSError:  # nothing can be seen from here
        return None


_boards: weakref.WeakKeyDictionary[ProcessGroup, VoteBoard] = weakref.WeakKeyDictionary()
_tokens: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
_making: dict[int, threading.Lock] = {}  # by process: in a forked child the threads are gone that held one


def vote_board(group: ProcessGroup) -> VoteBoard:
    """The group's board, as this rank sees it.

    Raises:
        ForkedProcess: this process was forked from the one that joined the group.
    """
    forks.refuse_child(group, _WHAT)
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
