"""The group's store, asked with a deadline.

A question ends when the process that keeps the store answers, whatever timeout the store has: that bounds ``get``
alone. A process that is stopped never answers, and meanwhile who asks hears no Ctrl-C. So a thread asks, and whoever
waits for it gives up at the deadline. What it still asks for is answered, or fails, when the store is heard of
again; until then others of this process that use the same store stand in line after it, each up to its own deadline.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch.distributed import ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_process_group_store

from ..call_site import call_site, text
from ..errors import WeftError, describe

_LEAST = 0.5  # seconds for an answer, also near the deadline: a rank that is missing is named, not the store
_STORE = "the group's store (rank 0's process keeps it, or the launcher's)"

T = TypeVar("T")
_Answers = SimpleQueue[tuple[Any, Exception | None]]


def restart_count() -> str:
    """How often torchrun has started the ranks anew: it keeps their store, with all that earlier ones left in it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class GroupStore:
    """A group's store, for as long as torch knows the group: whoever keeps it keeps rank 0's daemon and its port."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank = group.group_name, group.rank()
        self._store = weakref.ref(_get_process_group_store(group))

    def is_gone(self) -> bool:
        return self._store() is None

    def get(self, what: str) -> Store:
        """Not to be kept.

        Raises:
            WeftError: the group has been destroyed. ``what`` needs the store.
        """
        if (store := self._store()) is None:
            raise WeftError(
                f"{what} in group {self._group!r}: rank {self._rank}: the group has been destroyed"
            )
        return store


class StoreQuestions:
    """What one rank asks in one step: inside ``with`` a thread asks it, one question after the other."""

    def __init__(self, store: Store, what: str, group: str, rank: int) -> None:
        self._what, self._group, self._rank = what, group, rank
        self._begin = self._deadline = time.monotonic()
        self._longest = float("inf")
        self._silent = False
        self._queue: SimpleQueue[tuple[Callable[[Store], Any], _Answers] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_answer, args=(store, self._queue), name="weft-store", daemon=True
        )
        # At the latest once nobody can ask any more: Ctrl-C may come while the thread starts, or when it is to end.
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def __enter__(self) -> StoreQuestions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if not self._silent:
            self._thread.join(_LEAST)

    def limit(self, seconds: float, longest: float = float("inf")) -> None:
        """The deadline, from now on, of all questions together. Without it each has a moment.

        ``longest``: seconds that one of them may take, where ranks may take longer than the store.
        """
        self._deadline, self._longest = time.monotonic() + seconds, longest

    def ask(self, question: Callable[[Store], T]) -> T:
        """What ``question`` makes of the store.

        Raises:
            WeftError: the store cannot be reached, or has not answered in time; then it is asked nothing more.
        """
        if self._silent:
            raise self._no_answer()
        self._begin = time.monotonic()
        answers: _Answers = SimpleQueue()  # its own: one that Ctrl-C has left is not taken for the next
        self._queue.put((question, answers))
        try:
            left = min(self._deadline - self._begin, self._longest)
            answer, error = answers.get(timeout=max(left, _LEAST))
        except Empty:
            self._silent = True
            raise self._no_answer() from None
        if isinstance(error, RuntimeError):
            raise WeftError(
                f"{self._who()} cannot reach {_STORE}: {describe(error).splitlines()[0]}"
            ) from error
        if error is not None:
            raise error
        return answer  # type: ignore[no-any-return]

    def set(self, key: str, value: str) -> None:
        self.ask(lambda s: s.set(key, value))

    def tell(self, what: Callable[[Store], Any]) -> None:
        """Without a wait: a store that is silent hears of it when it answers again."""
        self._queue.put((what, SimpleQueue()))

    def _who(self) -> str:
        return f"{self._what} in group {self._group!r}: rank {self._rank}"

    def _no_answer(self) -> WeftError:
        waited, site = round(time.monotonic() - self._begin, 3), text(call_site())
        called = f" (called at {site})" if site else ""
        return WeftError(f"{self._who()} waited {waited:g} s for {_STORE}, which does not answer{called}")


def _answer(store: Store, queue: SimpleQueue[tuple[Callable[[Store], Any], _Answers] | None]) -> None:
    while (item := queue.get()) is not None:
        question, answers = item
        try:
            answers.put((question(store), None))
        except Exception as e:
            answers.put((None, e))
        del item, question, answers  # while it waits it keeps nothing alive


def peek(store: Store, key: str) -> str:
    """What a key holds that is not deleted meanwhile; "" before it is set."""
    return store.get(key).decode() if store.check([key]) else ""
