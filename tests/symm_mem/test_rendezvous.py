"""Ranks meet in a store that falls silent, fails or holds what others have left: threads take the ranks' parts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from weft import symm_mem
from weft.symm_mem.bootstrap import store as stores
from weft.symm_mem.bootstrap.rendezvous import Rendezvous


class Store:
    """A store whose keeper can be stopped, and lost."""

    def __init__(self) -> None:
        self.kept = dist.HashStore()
        self.answers = threading.Event()
        self.answers.set()
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self.answers.wait(20)
            if self.lost:
                raise dist.DistNetworkError("Broken pipe\nwhere that was")
            return getattr(self.kept, name)(*args)

        return ask


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(stores, "_get_process_group_store", lambda group: made)
    return made


def ranks(seconds: float = 60.0, count: int = 2) -> list[Rendezvous]:
    groups = (SimpleNamespace(group_name="g", rank=lambda r=r: r, size=lambda: count) for r in range(count))
    return [Rendezvous(group, "topic", lambda: seconds) for group in groups]  # type: ignore[arg-type]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns or raises."""
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(call) for call in calls]
        return [r.exception(30) or r.result() for r in running]


def meet(where: list[Rendezvous]) -> None:
    sessions = at_once(*(lambda w=w: w.join("meet") for w in where))
    assert len(set(sessions)) == 1, sessions


@pytest.mark.alone
def test_a_store_that_falls_silent_is_waited_for_up_to_the_deadline(store: Store) -> None:
    where = ranks(2.0)
    meet(where)
    store.answers.clear()
    waited = r"waited [2-9]\S* s"
    words = rf"^ask in group 'g': rank 0 {waited} for the group's store .*, which does not answer \(called"
    with pytest.raises(symm_mem.WeftError, match=words) as error:
        where[0].gather("ask", None)
    begin = time.monotonic()
    with pytest.raises(symm_mem.WeftError) as again:
        where[0].gather("ask", None)
    assert str(again.value) == str(error.value)
    assert time.monotonic() - begin < 2, "it waited again"
    with pytest.raises(symm_mem.WeftError, match=r"^reset in group 'g': rank 0 waited .* does not answer"):
        where[0].join("reset")
    assert time.monotonic() - begin < 10
    store.answers.set()
    with pytest.raises(symm_mem.PeerTimeout, match=r"rank 1 .* for rank 0: .* and it has given up"):  # noqa: PT012
        for _ in range(2):  # what rank 0 has asked for may come late
            where[1].gather("ask", None)
    meet(where)  # what the first try asked for late is not in its way
    assert at_once(*(lambda w=w: w.gather("ask", w.rank) for w in where)) == [[0, 1]] * 2


def test_a_silent_store_is_not_waited_for_as_long_as_ranks_that_compile(store: Store) -> None:
    where = ranks(0.6)
    meet(where)
    threading.Timer(0.2, store.answers.clear).start()
    begin = time.monotonic()
    with pytest.raises(
        symm_mem.WeftError, match=r"rank 0 waited (?:0\.[6-9]|[1-9]\.)\d* s .* which does not answer"
    ):
        where[0].run_on_all("prepare it", lambda: None, 30)
    assert time.monotonic() - begin < 15  # half of the 30
    store.answers.set()


def test_a_token_that_is_taken_back_late_is_posted_again(store: Store) -> None:
    """A store that was silent does what an earlier try asked it for once the next one has begun."""
    where = ranks(5)
    own = "weft/g/topic/0"

    def take_back() -> None:
        while not store.kept.check([own]):
            time.sleep(0.001)
        store.kept.set(own, "")

    def come_late() -> str:
        time.sleep(0.1)
        return where[1].join("meet")

    first, second, _ = at_once(lambda: where[0].join("meet"), come_late, take_back)
    assert first == second, (first, second)


def test_a_rank_that_has_given_up_is_not_blamed_for_the_one_it_waited_for(store: Store) -> None:
    where = ranks(0.6, count=3)
    where[0]._timeout = lambda: 0.3
    said = at_once(lambda: where[0].join("reset"), lambda: where[2].join("reset"))
    assert [e.culprit for e in said] == [1, 1]


def test_a_try_that_gives_up_leaves_the_token_of_the_next_one_alone(store: Store) -> None:
    where, next_one = ranks(0.6)[0], "the token of the next try"
    own = "weft/g/topic/0"
    looks = []

    def get(key: str) -> bytes:
        """The next try posts its token after a look at the key."""
        found: bytes = store.kept.get(key)
        if aborted.is_set() and key == own:
            looks.append(key)
            store.kept.set(own, next_one)
        return found

    aborted = threading.Event()
    store.get = get  # type: ignore[attr-defined]
    store.answers.clear()
    with pytest.raises(symm_mem.WeftError):
        where.join("meet")
    aborted.set()
    store.answers.set()
    for thread in threading.enumerate():
        if thread.name == "weft-store":
            thread.join(5)
    assert store.kept.get(own) == (next_one.encode() if looks else b"")


def test_a_rank_that_gives_up_says_so_in_its_session_however_late_the_store_is(store: Store) -> None:
    where = ranks(0.1)
    meet(where)
    store.answers.clear()
    failed = at_once(*(lambda w=w: w.gather("ask", w.rank) for w in where))
    assert all("does not answer" in str(e) for e in failed), failed
    asked = [t for t in threading.enumerate() if t.name == "weft-store"]
    assert asked
    for w in where:
        w.begin("next")
        w._timeout = lambda: 5.0
    store.answers.set()
    for thread in asked:
        thread.join(5)
    assert not store.kept.check(["weft/g/next/topic/gave up/0"])


def test_a_rank_that_leaves_a_session_which_the_others_have_begun_tells_them(store: Store) -> None:
    where = ranks()
    real = where[0]._all_here

    def leaves(*args: Any) -> str:
        real(*args)
        raise KeyboardInterrupt

    where[0]._all_here = leaves  # type: ignore[method-assign]
    left, _ = at_once(lambda: where[0].join("meet"), lambda: where[1].join("meet"))
    assert isinstance(left, KeyboardInterrupt)
    begin = time.monotonic()
    with pytest.raises(symm_mem.PeerTimeout, match=r"for rank 0: .* and it has given up"):
        where[1].gather("ask", None)
    assert time.monotonic() - begin < 20
    where[0]._all_here = real  # type: ignore[method-assign]
    meet(where)


def test_an_interrupt_while_a_thread_is_started_leaves_no_thread_and_tells_the_others(store: Store) -> None:
    where = ranks()
    meet(where)
    real = threading.Thread.start

    def interrupts(self: threading.Thread) -> None:
        real(self)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: patch.undo() or interrupts(self))
        with pytest.raises(KeyboardInterrupt):
            where[0].gather("ask", None)
    with pytest.raises(symm_mem.PeerTimeout, match="and it has given up"):
        where[1].gather("ask", None)
    with pytest.raises(symm_mem.CallAbandoned, match="ask: rank 0 of group 'g' left a call half-way"):
        where[0].gather("ask", None)
    end = time.monotonic() + 5
    while (left := [t for t in threading.enumerate() if t.name == "weft-store"]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


@pytest.mark.alone
def test_ctrl_c_ends_a_wait_for_a_silent_store(store: Store) -> None:
    where = ranks()
    meet(where)
    store.answers.clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            where[0].gather("ask", None)
        assert time.monotonic() - begin < 20
        with pytest.raises(symm_mem.CallAbandoned, match="ask: rank 0 of group 'g' left a call half-way:"):
            where[0].gather("ask", None)
    finally:
        signal.signal(signal.SIGINT, before)
        store.answers.set()


def test_a_store_that_is_lost_is_named(store: Store) -> None:
    where = ranks()
    meet(where)
    store.lost = True
    words = "in group 'g': rank 0 cannot reach the group's store .*: DistNetworkError: Broken pipe$"
    with pytest.raises(symm_mem.WeftError, match=f"^ask {words}"):
        where[0].gather("ask", None)
    with pytest.raises(symm_mem.WeftError, match=f"^reset {words}"):
        where[0].join("reset")


def test_a_rank_whose_deadline_cannot_be_read_tells_the_others(store: Store) -> None:
    def unreadable() -> float:
        raise ValueError("WEFT_TIMEOUT: is 'soon'")

    where = ranks()
    where[1]._timeout = unreadable
    meet(where)
    begin = time.monotonic()
    first, second = at_once(*(lambda w=w: w.gather("ask", None) for w in where))
    assert time.monotonic() - begin < 20
    assert isinstance(second, ValueError) and "and it has given up" in str(first)


def test_what_lies_in_the_store_from_before_is_read_by_nobody(store: Store) -> None:
    """A group had this name; and one rank has tried more often than the others."""
    old = ranks()
    meet(old)
    at_once(*(lambda w=w: w.gather("ask", "old") for w in old))
    for _ in range(2):
        with pytest.raises(
            symm_mem.PeerTimeout, match=r"rank 0 of group 'g' waited 0\.05 s for rank 1: its call"
        ):
            ranks(0.05)[0].join("meet")
    where = ranks()
    meet(where)
    assert at_once(*(lambda w=w: w.gather("ask", w.rank) for w in where)) == [[0, 1]] * 2


def test_a_rank_that_fails_before_a_step_that_the_others_take_in_between_is_heard(store: Store) -> None:
    where = ranks(count=3)
    meet(where)

    def prepare(w: Rendezvous) -> None:
        if w.rank == 1:
            raise ValueError("no such kernel")
        w.gather("allocate", None)
        raise AssertionError("one rank did not come")

    begin = time.monotonic()
    # Half an hour, as for a compilation: nobody waits for it.
    said = at_once(*(lambda w=w: w.run_on_all("prepare it", lambda: prepare(w), 1800) for w in where))
    assert time.monotonic() - begin < 10
    assert [str(e) for e in said] == ["prepare it in group 'g': rank 1: ValueError: no such kernel"] * 3
    assert at_once(*(lambda w=w: w.gather("go on", w.rank) for w in where)) == [[0, 1, 2]] * 3


def test_ranks_that_come_for_different_things_in_the_midst_of_a_step_all_say_so(store: Store) -> None:
    where = ranks()
    meet(where)
    steps = [lambda: None, lambda: where[1].gather("allocate", None)]
    said = at_once(
        *(lambda w=w, s=s: w.run_on_all("prepare it", s, 1800) for w, s in zip(where, steps, strict=True))
    )
    assert [type(e) for e in said] == [symm_mem.RankMismatch] * 2
    assert {str(e) for e in said} == {
        "step 0 in group 'g': rank 1 asked for 'allocate', rank 0 for 'prepare it'"
    }
    assert at_once(*(lambda w=w: w.gather("go on", w.rank) for w in where)) == [[0, 1]] * 2
