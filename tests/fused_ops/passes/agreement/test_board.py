"""The ranks' agreement by itself: threads take the ranks' parts, collectives are barriers that know who came how."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from weft import symm_mem
from weft.fused_ops.passes.agreement.votes import board as boards
from weft.fused_ops.passes.agreement.votes import board_file, vote_rows
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.fused_ops.passes.agreement.votes.vote import (
    ANOTHER_GRAPH,
    CANNOT_FUSE,
    LATE,
    LOCKED,
    NO_BOARD,
    PASSED_BY,
    Answer,
    Vote,
)
from weft.symm_mem.backends.host import host_identity
from weft.symm_mem.bootstrap import store as store_module

LONG = 60.0  # seconds: a deadline that no test waits for


@dataclass(eq=False)
class Group:
    """As much of a ProcessGroup as a board asks for."""

    number: int
    count: int
    store: Any
    group_name: str = "g"

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept = []  # as torch does while it knows the group

    def of(group: Group) -> Any:
        kept.append(group.store)
        return group.store

    monkeypatch.setattr(store_module, "_get_process_group_store", of)
    yield
    kept.clear()


def make(count: int) -> list[VoteBoard]:
    store = dist.HashStore()
    made = [VoteBoard(Group(rank, count, store)) for rank in range(count)]  # type: ignore[arg-type]
    assert made[0].attached()
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive(), "a rank hangs"
    return results


def post(begun: int, count: int = 2, signature: int = 7, can_fuse: bool = True, turns: int = 0) -> Vote:
    return Vote(turns, begun, count, signature, can_fuse)


def ask_all(where: list[VoteBoard], posts: list[Vote], timeout: float = 10.0) -> list[Answer]:
    return at_once(*(lambda b=b, p=p: b.ask(p, lambda: timeout) for b, p in zip(where, posts, strict=True)))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_same_graph_runs_fused(count: int) -> None:
    where = make(count)
    for turn in range(20):
        answers = ask_all(where, [post(turn // 3, turns=turn)] * count)
        assert [a.fused for a in answers] == [True] * count
    assert [b.turns for b in where] == [20] * count


def test_another_graph() -> None:
    answers = ask_all(make(3), [post(4), post(4, signature=8), post(4)])
    assert [a.fused for a in answers] == [False] * 3
    assert {a.why for a in answers} == {ANOTHER_GRAPH}
    assert answers[1].peer in (0, 2)


def test_a_graph_that_begins_within() -> None:
    where = make(2)
    first = threading.Thread(target=where[0].ask, args=(post(4, count=3), lambda: LONG), daemon=True)
    first.start()
    assert where[1].ask(post(5, count=2, signature=8), lambda: LONG).why == ANOTHER_GRAPH
    first.join(LONG / 2)
    assert not first.is_alive()


def test_who_is_not_willing_does_not_wait_and_stops_the_others() -> None:
    where = make(2)
    assert where[0].ask(post(0, can_fuse=False), lambda: LONG).why == CANNOT_FUSE
    begin = time.monotonic()
    assert where[1].ask(post(0), lambda: LONG) == Answer(False, CANNOT_FUSE, 0)
    assert time.monotonic() - begin < LONG / 2


def test_who_has_passed_by_is_not_waited_for() -> None:
    where = make(2)
    waiting: list[Answer] = []
    thread = threading.Thread(target=lambda: waiting.append(where[0].ask(post(4), lambda: LONG)), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert where[1].ask(post(6, can_fuse=False), lambda: LONG).why == CANNOT_FUSE
    thread.join(LONG / 2)
    assert waiting == [Answer(False, PASSED_BY, 1)]
    # And when the other one has come and gone before.
    assert where[0].ask(post(4), lambda: LONG) == Answer(False, PASSED_BY, 1)


def test_who_does_not_come_is_waited_for_once_and_may_be_late() -> None:
    where = make(2)
    where[1].attached()
    missed = post(4)
    assert where[0].ask(missed, lambda: 0.05) == Answer(False, LATE, 1)
    assert where[0].came_after_all(1, missed) is None
    assert not where[1].ask(missed, lambda: LONG).fused  # late: it gets the answer that rank 0 has
    assert where[0].came_after_all(1, missed) is True
    assert [a.fused for a in ask_all(where, [post(6)] * 2)] == [True] * 2


def test_who_ran_something_else_was_not_late() -> None:
    where = make(2)
    missed = post(4)
    assert where[0].ask(missed, lambda: 0.05).why == LATE
    where[1].ask(post(6, can_fuse=False), lambda: LONG)
    assert where[0].came_after_all(1, missed) is False


def test_who_may_still_come_is_not_known_to_have_run_something_else() -> None:
    """A graph without collectives of the group leaves a rank where it is."""
    where = make(2)
    missed = post(4)
    assert where[0].ask(missed, lambda: 0.05).why == LATE
    where[1].ask(post(4, count=0, signature=8, can_fuse=False), lambda: LONG)
    assert where[0].came_after_all(1, missed) is None
    where[1].ask(missed, lambda: LONG)
    assert where[0].came_after_all(1, missed) is True


def test_the_last_posts_are_remembered_however_many_there_were() -> None:
    where = make(2)
    assert where[1].attached()
    for i in range(3 * vote_rows._KEPT):
        where[1].ask(post(2 * i, can_fuse=False), lambda: LONG)
    missed = post(6 * vote_rows._KEPT)
    assert where[0].ask(missed, lambda: 0.05).why == LATE
    for i in range(vote_rows._KEPT // 2):
        where[1].ask(post(missed.begun + 2 * i, can_fuse=False), lambda: LONG)
    assert where[0].came_after_all(1, missed) is True


def test_a_board_that_is_not_there() -> None:
    store = dist.HashStore()
    lonely = VoteBoard(Group(1, 2, store))  # type: ignore[arg-type]
    assert lonely.ask(post(0), lambda: 0.05) == Answer(False, NO_BOARD, 0)
    kept = VoteBoard(Group(0, 2, store))  # type: ignore[arg-type]
    assert kept.attached() and lonely.attached()


def test_who_has_passed_by_before_there_was_a_board_is_not_waited_for() -> None:
    store = dist.HashStore()
    early, also = (VoteBoard(Group(rank, 3, store)) for rank in (1, 2))  # type: ignore[arg-type]
    for begun in (0, 4):  # the last of them counts
        assert early.ask(post(begun, can_fuse=False), lambda: LONG) == Answer(False, CANNOT_FUSE, 1)
    waiting: list[Answer] = []
    thread = threading.Thread(target=lambda: waiting.append(also.ask(post(4), lambda: LONG)), daemon=True)
    thread.start()
    kept = VoteBoard(Group(0, 3, store))  # type: ignore[arg-type]
    begin = time.monotonic()
    assert kept.ask(post(4), lambda: LONG) == Answer(False, CANNOT_FUSE, 1)
    thread.join(LONG / 2)
    assert waiting == [Answer(False, CANNOT_FUSE, 1)]
    assert time.monotonic() - begin < LONG / 2
    # What came in time stands, whatever the note says.
    answers = at_once(*(lambda b=b: b.ask(post(6), lambda: LONG) for b in (kept, early, also)))  # type: ignore[misc]
    assert all(a.fused for a in answers)


def test_a_lock_that_is_held_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    where = make(2)
    assert where[1].attached()
    begin = time.monotonic()
    with where[1]._lock(lambda: LONG):
        assert where[0].ask(post(4), lambda: 0.2) == Answer(False, LOCKED, 0)
        assert where[0].ask(post(5, can_fuse=False), lambda: LONG) == Answer(False, CANNOT_FUSE, 0)
        assert where[0].ask(post(6), lambda: LONG) == Answer(False, LOCKED, 0)
        assert time.monotonic() - begin < LONG / 2
    assert [a.fused for a in ask_all(where, [post(8)] * 2)] == [True] * 2
    # Once others may count on its post, a rank cannot go on without them.
    with ExitStack() as held:
        posted = where[0]._post
        monkeypatch.setattr(where[0], "_post", lambda *a: (posted(*a), take.start()))
        take = threading.Thread(target=lambda: held.enter_context(where[1]._lock(lambda: LONG)), daemon=True)
        words = "^agree on a graph: rank 0 of group 'g' waited 0.2 s for the lock of the ranks' board"
        with pytest.raises(symm_mem.WeftError, match=words):
            where[0].ask(post(10, turns=1), lambda: 0.2)


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_question_counts_on_all_ranks_or_on_none(late: bool) -> None:
    where = make(2)
    assert where[1].attached()
    real = where[0]._answer

    def interrupts() -> Answer | None:
        where[0]._answer = real  # type: ignore[method-assign]
        if late:  # all have the answer
            assert where[1].ask(post(4), lambda: LONG).fused
        raise KeyboardInterrupt

    where[0]._answer = interrupts  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        where[0].ask(post(4), lambda: LONG)
    assert [b.turns for b in where] == [int(late)] * 2
    if not late:  # nobody counts on what was taken back
        assert where[1].ask(post(4), lambda: 0.2) == Answer(False, LATE, 0)
    turns = where[0].turns
    assert [a.fused for a in ask_all(where, [post(6, turns=turns)] * 2)] == [True] * 2


def test_ctrl_c_just_after_a_lock_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    where = make(2)
    assert where[1].attached()
    real = fcntl.flock

    def interrupts(fd: int, how: int) -> None:
        monkeypatch.undo()
        real(fd, how)
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupts)
    with pytest.raises(KeyboardInterrupt):
        where[0].ask(post(4), lambda: LONG)
    assert where[1].ask(post(4), lambda: 0.2) == Answer(False, LATE, 0)


def test_a_rank_that_is_interrupted_in_the_midst_of_its_post_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = make(2)
    assert where[1].attached()
    with monkeypatch.context() as patch:
        patch.setattr(where[0], "_meet", Mock(side_effect=KeyboardInterrupt))
        patch.setattr(where[0], "_spread", lambda words: None)
        with pytest.raises(KeyboardInterrupt):
            where[0].ask(post(4), lambda: LONG)
    assert where[1].ask(post(4), lambda: 0.1) == Answer(False, LATE, 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("done", [False, True])
def test_a_board_whose_making_an_exception_has_ended_is_made_all_the_same(
    rank: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    groups = [Group(r, 2, store) for r in range(2)]
    real = VoteBoard._asked

    def interrupts(board: VoteBoard, question: Any) -> Any:
        if done:  # it was asked for, but nobody has heard the answer
            real(board, question)
        raise KeyboardInterrupt

    where: dict[int, VoteBoard] = {}

    def count(r: int) -> None:
        where[r] = VoteBoard(groups[r])  # type: ignore[arg-type]

    def attach(r: int) -> None:
        assert where[r].attached()

    for make_one in (count, attach):
        with monkeypatch.context() as patch:
            patch.setattr(VoteBoard, "_asked", interrupts)
            with pytest.raises(KeyboardInterrupt):
                make_one(rank)
        if make_one is attach and done and rank == 0:
            attach(1)  # what rank 0 has told of by then stays
        for r in range(2):
            make_one(r)
    assert [a.fused for a in ask_all([where[0], where[1]], [post(4)] * 2)] == [True] * 2


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_board_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    where = make(2)
    assert where[1].attached() and open_files() > before
    del where
    assert open_files() == before
    store = dist.HashStore()
    kept, other = (VoteBoard(Group(rank, 2, store)) for rank in range(2))  # type: ignore[arg-type]
    assert kept.attached()
    held = open_files()
    kept._words[0] += 1  # type: ignore[index]
    assert not other.attached()
    assert open_files() == held


def test_a_groups_board_goes_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[Group] = []
    monkeypatch.setattr(boards, "has_name", lambda group, name: group in there)
    before = open_files()
    groups = [Group(0, 1, dist.HashStore()) for _ in range(3)]
    for group in groups[:2]:
        there[:] = [group]
        known = boards.vote_board(group)  # type: ignore[arg-type]
        assert boards.vote_board(group) is known  # type: ignore[arg-type]
    assert list(boards._boards) == [groups[1]], "one that is destroyed but kept"
    del groups, group, known
    there.clear()
    assert open_files() == before


def test_a_rank_that_cannot_see_the_board_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    where = make(3)
    assert where[2].attached()
    there = {**host_identity(), "boot": "another", "host": "there"}
    monkeypatch.setattr(board_file, "_host", lambda: there)
    begin = time.monotonic()
    answers = ask_all(where, [post(4)] * 3, timeout=LONG)
    assert answers[1] == Answer(False, NO_BOARD, 0)
    # One of the two finds out, and the other has the same answer.
    assert answers[0] == answers[2] == Answer(False, NO_BOARD, 1)
    assert time.monotonic() - begin < LONG / 2


def test_what_stands_after_a_signature() -> None:
    where = make(2)
    where[0].tell(8, "a gather")
    where[0].ask(post(0, signature=8, can_fuse=False), lambda: 1.0)
    assert where[1].attached()
    assert where[1].told(0) == "a gather"
    assert where[1].told(1) is None
