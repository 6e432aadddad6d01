"""Ranks agree with each other through the group's store.

Every step has a number. A rank posts what it wants under (step, rank) and reads what the others posted:
whoever differs is named with both values, whoever is missing is named when the deadline has passed, or as soon as
its process is known to have ended.

A step that one rank leaves early leaves the ranks at different numbers. So it takes no further steps, and says why in
the same words, until ``come_together`` has begun a new session for all ranks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_process_group_store

from . import processes
from .errors import CallAbandoned, PeerTimeout, RankMismatch, WeftError, describe
from .sites import call_site, text

_SHORTEST, _LONGEST = 0.0002, 0.01  # seconds between two looks into the store
_LOOK = 0.05  # seconds between two looks whether the awaited rank's process is still there

_sessions: dict[str, tuple[ProcessGroup, str]] = {}  # of groups that have been reset


class Rendezvous:
    """The meeting point of one group's ranks. Every method is collective.

    Attributes:
        processes: of each rank, once known: ``processes.identity()``.
    """

    def __init__(self, group: ProcessGroup, topic: str, timeout: Callable[[], float]) -> None:
        self.group_name: str = group.group_name
        self.rank, self.world_size = group.rank(), group.size()
        self.processes: list[dict[str, Any] | None] = [None] * self.world_size
        self._store: Store = _get_process_group_store(group)
        self._timeout = timeout
        self._topic = topic
        self._broken: WeftError | None = None
        known = _sessions.get(self.group_name)
        self.begin(known[1] if known is not None and known[0] is group else "")

    def begin(self, session: str) -> None:
        """Begin at step 0, under keys of this session."""
        # A store may outlive a group of this name: each rank counts its own meetings, so that keys are new.
        prefix = f"weft/{self.group_name}/{session}/{self._topic}"
        self._prefix = f"{prefix}/{self._store.add(f'{prefix}/made/{self.rank}', 1)}"
        self._step = 0
        self._broken = None

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def _farewell(self, rank: int) -> str:
        return f"{self._prefix}/gave up/{rank}"

    def gather(self, what: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank.

        Args:
            timeout: seconds, where the group's deadline is not what counts.

        Raises:
            PeerTimeout: a rank did not come.
            RankMismatch: a rank came with another ``what``.
            WeftError: the store does not answer, or an earlier step was not completed.
        """
        if self._broken is not None:
            raise self._broken.again()
        step, self._step = self._step, self._step + 1
        seconds = self._timeout() if timeout is None else timeout
        try:
            self._store.set(self._key(step, self.rank), json.dumps([what, value]))
            begin = time.monotonic()
            posts = [self._read(step, rank, what, begin, seconds) for rank in range(self.world_size)]
            if step:  # whoever posted this step has read the one before
                self._store.delete_key(self._key(step - 1, self.rank))
        except BaseException as e:
            self.abandon(what, e)
            if isinstance(e, WeftError) or not isinstance(e, RuntimeError):
                raise
            raise WeftError(
                f"{what} in group {self.group_name!r}: rank {self.rank} cannot reach the group's store "
                f"(rank 0's process keeps it, or the launcher's): {_first_line(e)}"
            ) from e
        for rank, (topic, _) in enumerate(posts):
            if topic != posts[0][0]:
                raise RankMismatch(f"step {step}", self.group_name, rank, repr(topic), repr(posts[0][0]))
        return [post[1] for post in posts]

    def abandon(self, what: str, cause: BaseException) -> None:
        """This rank does not complete a step: no further ones until ``begin``, and the others are told."""
        if self._broken is not None:
            return
        with suppress(RuntimeError):  # the store may be what has failed
            self._store.set(self._farewell(self.rank), str(getattr(cause, "culprit", self.rank)))
        if isinstance(cause, WeftError):
            self._broken = cause.again()
        else:
            self._broken = CallAbandoned(
                what, self.group_name, self.rank, _first_line(cause), text(call_site())
            )

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """Every rank must come with the same ``value``.

        Raises:
            RankMismatch: on every rank, naming the first rank that differs from rank 0 and both values.
        """
        self.check_equal(what, self.gather(what, value))

    def check_equal(self, what: str, values: list[dict[str, Any]]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RankMismatch(what, self.group_name, rank, _text(value), _text(values[0]))

    def settle(self, what: str, problem: str | None, timeout: float | None = None) -> None:
        """All ranks go on, or none: raises on every rank when one of them has a problem."""
        self.refuse(what, self.gather(what, problem, timeout))

    def refuse(self, what: str, problems: list[str | None]) -> None:
        found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
        if found:
            raise WeftError(f"{what} in group {self.group_name!r}: {'; '.join(found)}")

    def _read(self, step: int, rank: int, what: str, begin: float, seconds: float) -> Any:
        key = self._key(step, rank)
        pause, look = _SHORTEST, begin + _LOOK
        ended, blames = False, None
        # Not the store's own wait: it lets no other thread's question through, and no Ctrl-C.
        while not self._store.check([key]):
            now = time.monotonic()
            if ended or blames is not None or now - begin > seconds:
                waited, site = min(now - begin, seconds), text(call_site())
                where = f"step {step} in the store"
                name, me = self.group_name, self.rank
                raise PeerTimeout(
                    what, name, me, rank, where, "a post", "nothing", waited, site, ended, blames
                )
            if now > look:  # it may have posted just before: look for that once more
                ended = processes.has_ended(self.processes[rank])
                if not ended and self._store.check([self._farewell(rank)]):
                    blames = int(self._store.get(self._farewell(rank)))
                look = now + _LOOK
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return json.loads(self._store.get(key))


def come_together(
    group: ProcessGroup, what: str, seconds: float, known: list[dict[str, Any] | None] | None = None
) -> str:
    """The name of a new session that all ranks begin, whatever state an error has left each of them in.

    Each rank posts a token that is new at every try, and what it has seen of the others' tokens. All ranks are here,
    in this try, once all have seen the same tokens. A rank that gives up takes its token back.

    Args:
        known: the ranks' processes, where they are known.

    Raises:
        PeerTimeout: a rank did not come.
    """
    store: Store = _get_process_group_store(group)
    rank, size = group.rank(), group.size()
    tokens = [f"weft/{group.group_name}/together/{r}" for r in range(size)]
    views = [f"{key}/seen" for key in tokens]
    begin, pause = time.monotonic(), _SHORTEST
    missing, session = 0, ""
    store.set(tokens[rank], secrets.token_hex(16))
    try:
        while True:
            here = [_get(store, key) for key in tokens]
            if "" in here:
                missing = here.index("")
            else:
                now = hashlib.sha256("".join(here).encode()).hexdigest()[:16]
                if now != session:
                    session = now
                    store.set(views[rank], session)
                seen = [_get(store, key) == session for key in views]
                if all(seen):
                    _sessions[group.group_name] = (group, session)
                    return session
                missing = seen.index(False)
            waited = time.monotonic() - begin
            gone = [r for r in range(size) if known is not None and processes.has_ended(known[r])]
            if waited > seconds or gone:
                missing = gone[0] if gone else missing
                name, site, waited = group.group_name, text(call_site()), min(waited, seconds)
                raise PeerTimeout(
                    what, name, rank, missing, "its call", "made", "not made", waited, site, bool(gone)
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
    except BaseException:
        store.set(tokens[rank], "")
        raise


def _get(store: Store, key: str) -> str:
    """What a key that is never deleted holds; "" before it is set."""
    return store.get(key).decode() if store.check([key]) else ""


def _text(value: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items())


def _first_line(error: BaseException) -> str:
    return describe(error).splitlines()[0]
