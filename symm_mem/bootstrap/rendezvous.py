"""Ranks agree with each other through the group's store.

Every step has a number. A rank posts what it wants under (step, rank) and reads what the others posted:
whoever differs is named with both values, whoever is missing is named when the deadline has passed, or as soon as
its process is known to have ended.

A step that one rank leaves early leaves the ranks at different numbers. So it takes no further steps, and says why in
the same words, until all ranks have begun another session. A session's name is new, and all its keys have it: what an
earlier one has left in the store, or a group that had this group's name, is read by nobody.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from .. import errors, flight_recorder
from ..call_site import call_site, calling, text
from ..errors import CallAbandoned, PeerTimeout, PeerWait, RankMismatch, WaitOutcome, WeftError, describe
from ..forks import Owner
from . import processes
from .store import GroupStore, StoreQuestions, peek

_SHORTEST, _LONGEST = 0.0002, 0.01  # seconds between two looks into the store
_LOOK = 0.05  # seconds between two looks whether the awaited rank's process is still there
_UNREADABLE = 300.0  # seconds in which a rank that cannot read its own deadline joins the others

T = TypeVar("T")


class Rendezvous:
    """The meeting point of one group's ranks. Every method is collective; ``join`` or ``begin`` comes first.

    Attributes:
        processes: of each rank, once known: ``processes.identity()``.
        session: its name, the same on all ranks and new after each reset; "" before the first one.
    """

    def __init__(self, group: ProcessGroup, topic: str, timeout: Callable[[], float]) -> None:
        self.group_name: str = group.group_name
        self.rank, self.world_size = group.rank(), group.size()
        self.processes: list[dict[str, Any] | None] = [None] * self.world_size
        self._owner = Owner(group)
        self._store = GroupStore(group)
        self._timeout = timeout
        self._topic = topic
        self.session = ""
        self._prefix = ""  # before the first session
        self._step = 0
        self._broken: WeftError | None = None

    def begin(self, session: str) -> None:
        """Begin at step 0, under keys of this session."""
        self.session = session
        self._prefix = f"weft/{self.group_name}/{session}/{self._topic}"
        self._step = 0
        self._broken = None

    def join(self, what: str) -> str:
        """Begin a new session with all ranks, whatever state an error has left each of them in; returns its name.

        Each rank posts a token that is new at every try, and what it has seen of the others' tokens. All ranks have
        joined this try once all have seen the same tokens. A rank that gives up withdraws its token, or posts an abort
        notice in the session, if the others may have begun it already.

        Raises:
            PeerTimeout: a rank did not come.
            WeftError: the store cannot be reached, or does not answer.
        """
        try:
            seconds = self._timeout()
        except ValueError:  # the first step raises it, where the others hear of it
            seconds = _UNREADABLE
        keys = [f"weft/{self.group_name}/{self._topic}/{rank}" for rank in range(self.world_size)]
        own, token = keys[self.rank], secrets.token_hex(16)
        self._prefix, self._broken = "", None
        with self.poison_on_error(what), self._questions(what) as store:
            store.limit(seconds)
            try:
                store.set(own, token)
                return self._all_here(store, keys, token, _named(what, "every rank of the group"), seconds)
            except BaseException as e:
                if not self._prefix:  # a store that answers late must not lose the next try's token
                    store.tell(lambda s: s.compare_set(own, token, ""))
                self._give_up(store, what, e)
                raise

    def _all_here(self, store: StoreQuestions, keys: list[str], token: str, what: str, seconds: float) -> str:
        begin, pause = time.monotonic(), _SHORTEST
        views = [""] * self.world_size
        came: set[int] = set()
        patience = min(errors.PATIENT, errors.SILENT)
        while True:
            here = store.ask(lambda s: [peek(s, key) for key in keys])
            if here[self.rank] != token:  # a silent store has done only now what an earlier try asked for
                store.set(keys[self.rank], token)
                missing = self.rank
            elif absent := [rank for rank, there in enumerate(here) if not there]:
                # Not one that has been here and has given up, most likely on the same rank.
                missing = next((rank for rank in absent if rank not in came), absent[0])
            else:
                session = hashlib.sha256("".join(here).encode()).hexdigest()[:16]
                if views[self.rank] != session:
                    self.begin(session)  # the others may do so once they see that
                    store.set(f"{keys[self.rank]}/seen", session)
                views = store.ask(lambda s: [peek(s, f"{key}/seen") for key in keys])
                if set(views) == {session}:
                    return session
                missing = [view == session for view in views].index(False)
            came.update(rank for rank, there in enumerate(here) if there)
            waited = time.monotonic() - begin
            gone = [rank for rank, process in enumerate(self.processes) if processes.has_ended(process)]
            if waited > seconds or gone:
                peer, waited = gone[0] if gone else missing, min(waited, seconds)
                call = "its call", "made", text(call_site())
                wait = PeerWait(what, self.group_name, self.rank, peer, *call)
                raise PeerTimeout(wait, WaitOutcome("not made", waited, bool(gone)))
            if waited > patience:
                patience = errors.SILENT if waited <= errors.SILENT else math.inf
                call = "its call", "made", text(call_site())
                errors.name_late_rank(PeerWait(what, self.group_name, self.rank, missing, *call), waited)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def _abort_notice(self, rank: int) -> str:
        return f"{self._prefix}/gave up/{rank}"

    def gather(
        self, what: str, value: Any, timeout: float | None = None, *, failed: bool = False
    ) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank.

        Args:
            timeout: seconds, where the group's deadline is not what counts.
            failed: ``value`` is why this rank cannot go on.

        Raises:
            PeerTimeout: a rank did not come.
            RankMismatch: a rank came with another ``what``.
            WeftError: the store does not answer, or an earlier step was not completed; or a rank came with another
                ``what`` because it cannot go on.
        """
        if self._broken is not None:
            raise self._broken.again()
        step, self._step = self._step, self._step + 1
        with self.poison_on_error(what), self._questions(what) as store:
            try:
                deadline = self._timeout()
                seconds = deadline if timeout is None else timeout
                store.limit(seconds, deadline)
                store.set(self._key(step, self.rank), json.dumps([what, value, failed]))
                begin = time.monotonic()
                name = _named(what)
                posts = [self._read(store, step, r, name, begin, seconds) for r in range(self.world_size)]
                if step:  # whoever posted this step has read the one before
                    before = self._key(step - 1, self.rank)
                    store.ask(lambda s: s.delete_key(before))
            except BaseException as e:
                self._give_up(store, what, e)
                raise
        topics = [topic for topic, _, _ in posts]
        if len(set(topics)) > 1:
            raise self._out_of_step(step, posts)
        return [value for _, value, _ in posts]

    def _out_of_step(self, step: int, posts: list[tuple[str, Any, bool]]) -> WeftError:
        """What all ranks raise that have come to this step for different things."""
        refusing = [topic for topic, _, failed in posts if failed]
        if refusing:  # the others had gone on to a step in the midst of what these could not do
            error = self._refusal(refusing[0], [why if failed else None for _, why, failed in posts])
        else:
            rank, topic = next((r, post[0]) for r, post in enumerate(posts) if post[0] != posts[0][0])
            error = RankMismatch(f"step {step}", self.group_name, rank, repr(topic), repr(posts[0][0]))
        error.out_of_step = True
        return error

    @contextmanager
    def poison_on_error(self, what: str) -> Iterator[None]:
        """An exception in the body ends this rank's part in further steps, and the others get an abort notice."""
        try:
            yield
        except WeftError:
            raise  # every rank raises it, or a step has posted the abort notice
        except BaseException as e:
            self.abandon(what, e)
            raise

    def abandon(self, what: str, cause: BaseException) -> WeftError:
        """This rank does not complete a step: it takes none until ``begin``, and posts an abort notice.

        Returns: what it refuses further ones with.
        """
        if self._broken is None and self._store.is_gone():
            self._refuse_steps(what, cause)  # nobody is left who would hear of it
        elif self._broken is None:
            with self._questions(what) as store:
                self._give_up(store, what, cause)
        assert self._broken is not None
        return self._broken

    def _give_up(self, store: StoreQuestions, what: str, cause: BaseException) -> None:
        blamed = str(getattr(cause, "culprit", self.rank))
        if self._prefix:
            # Now: a store that is silent hears of it in the next session.
            abort_notice = self._abort_notice(self.rank)
            store.tell(lambda s: s.set(abort_notice, blamed))
        self._refuse_steps(what, cause)

    def _refuse_steps(self, what: str, cause: BaseException) -> None:
        if isinstance(cause, WeftError):
            self._broken = cause.again()
        else:
            self._broken = CallAbandoned(
                what, self.group_name, self.rank, describe(cause).splitlines()[0], text(call_site())
            )
        flight_recorder.failed(self._broken)

    def _questions(self, what: str) -> StoreQuestions:
        self._owner.refuse_child(what)
        return StoreQuestions(self._store.get(what), what, self.group_name, self.rank)

    def check_equal(self, what: str, values: list[dict[str, Any]]) -> None:
        """All ranks must have come with the same value.

        Raises:
            RankMismatch: on every rank, naming the first rank that differs from rank 0 and both values.
        """
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RankMismatch(what, self.group_name, rank, _text(value), _text(values[0]))

    def report_outcome(self, what: str, problem: str | None, timeout: float | None = None) -> None:
        """All ranks go on, or none: raises on every rank when one of them has a problem."""
        self.refuse(what, self.gather(what, problem, timeout, failed=problem is not None))

    def run_on_all(self, what: str, step: Callable[[], T], timeout: float | None = None) -> T:
        """Run a step that may fail here; if it fails on any rank, every rank raises."""
        problem: str | None = None
        try:
            result = step()
        except Exception as e:
            if isinstance(e, WeftError) and e.out_of_step:
                raise
            problem = describe(e)
        self.report_outcome(what, problem, timeout)
        return result

    def refuse(self, what: str, problems: list[str | None]) -> None:
        if any(problem is not None for problem in problems):
            raise self._refusal(what, problems)

    def _refusal(self, what: str, problems: list[str | None]) -> WeftError:
        found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
        return WeftError(f"{what} in group {self.group_name!r}: {'; '.join(found)}")

    def _read(
        self, store: StoreQuestions, step: int, rank: int, what: str, begin: float, seconds: float
    ) -> Any:
        key, abort_notice = self._key(step, rank), self._abort_notice(rank)
        pause, look = _SHORTEST, begin + _LOOK
        ended, blames, patience = False, None, min(errors.PATIENT, errors.SILENT)
        # Not the store's own wait: it lets no other thread's question through.
        while not (post := store.ask(lambda s: peek(s, key))):
            now = time.monotonic()
            missing = f"step {step} in the store", "a post"
            if now - begin > patience:
                patience = errors.SILENT if now - begin <= errors.SILENT else math.inf
                wait = PeerWait(what, self.group_name, self.rank, rank, *missing, text(call_site()))
                errors.name_late_rank(wait, now - begin)
            if ended or blames is not None or now - begin > seconds:
                wait = PeerWait(what, self.group_name, self.rank, rank, *missing, text(call_site()))
                raise PeerTimeout(wait, WaitOutcome("nothing", min(now - begin, seconds), ended, blames))
            if now > look:  # it may have posted just before: look for that once more
                ended = processes.has_ended(self.processes[rank])
                if not ended and (said := store.ask(lambda s: peek(s, abort_notice))):
                    blames = int(said)
                look = now + _LOOK
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return json.loads(post)


def _named(what: str, who: str = "") -> str:
    """A step, for errors: with the op that is being called, if one is, and who must call it."""
    if calling.op is None:
        return what
    return f"{what} for {calling.op}{f', which {who} must call' if who else ''}"


def _text(value: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items())
