"""The ranks' agreement by itself: threads take the ranks' parts, collectives are barriers that know who came how."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from weft.fused_ops.passes.agreement.votes import board as boards
from weft.fused_ops.passes.agreement.votes import board_file, vote_rows
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.fused_ops.passes.agreement.votes.vote_rows import (
    ANOTHER_GRAPH,
    CANNOT_FUSE,
    LATE,
    LEFT,
    NO_BOARD,
    PASSED_BY,
    Answer,
    Vote,
)
from weft.symm_mem import WeftError
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
    assert all(b.attached() for b in made)
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


def post(begun: int, count: int = 2, signature: int = 7, can_fuse: bool = True) -> Vote:
    return Vote(begun, count, signature, can_fuse)


def turns(where: list[VoteBoard]) -> list[int]:
    """Graphs that each rank has run fused."""
    return [0 if (words := b._file.words) is None else words[b._own + vote_rows._RUN] for b in where]


def ask_all(where: list[VoteBoard], posts: list[Vote], timeout: float = 10.0) -> list[Answer]:
    return at_once(*(lambda b=b, p=p: b.ask(p, timeout) for b, p in zip(where, posts, strict=True)))


def test_ranks_that_torchrun_has_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps their store. Of the earlier ranks one had a board, and the other died before it had one."""
    store = dist.HashStore()
    for restarts, ranks in enumerate(([0], [0, 1])):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        where = [VoteBoard(Group(rank, 2, store)) for rank in ranks]  # type: ignore[arg-type]
    assert all(b.attached() for b in where)
    assert all(a.fused for a in ask_all(where, [post(0)] * 2))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_same_graph_runs_fused(count: int) -> None:
    where = make(count)
    for turn in range(20):
        answers = ask_all(where, [post(turn // 3)] * count)
        assert [a.fused for a in answers] == [True] * count
    assert turns(where) == [20] * count


def test_another_graph() -> None:
    answers = ask_all(make(3), [post(4), post(4, signature=8), post(4)])
    assert [a.fused for a in answers] == [False] * 3
    assert {a.why for a in answers} == {ANOTHER_GRAPH}
    assert answers[1].peer in (0, 2)


def test_a_graph_that_begins_within() -> None:
    where = make(2)
    first = threading.Thread(target=where[0].ask, args=(post(4, count=3), LONG), daemon=True)
    first.start()
    assert where[1].ask(post(5, count=2, signature=8), LONG).why == ANOTHER_GRAPH
    first.join(LONG / 2)
    assert not first.is_alive()


def test_who_is_not_willing_does_not_wait_and_stops_the_others() -> None:
    where = make(2)
    assert where[0].ask(post(0, can_fuse=False), LONG).why == CANNOT_FUSE
    begin = time.monotonic()
    assert where[1].ask(post(0), LONG) == Answer(False, CANNOT_FUSE, 0)
    assert time.monotonic() - begin < LONG / 2


def test_who_has_passed_by_is_not_waited_for() -> None:
    where = make(2)
    waiting: list[Answer] = []
    thread = threading.Thread(target=lambda: waiting.append(where[0].ask(post(4), LONG)), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert where[1].ask(post(6, can_fuse=False), LONG).why == CANNOT_FUSE
    thread.join(LONG / 2)
    assert waiting == [Answer(False, PASSED_BY, 1)]
    # And when the other one has come and gone before.
    assert where[0].ask(post(4), LONG) == Answer(False, PASSED_BY, 1)


def test_who_does_not_come_is_waited_for_once_and_may_be_late() -> None:
    where = make(2)
    missed = post(4)
    assert where[0].ask(missed, 0.05) == Answer(False, LATE, 1)
    assert not where[1].ask(missed, LONG).fused  # late: it gets the answer that rank 0 has
    assert [a.fused for a in ask_all(where, [post(6)] * 2)] == [True] * 2


def test_who_has_passed_by_before_there_was_a_board_is_not_waited_for() -> None:
    store = dist.HashStore()
    early, also = (VoteBoard(Group(rank, 3, store)) for rank in (1, 2))  # type: ignore[arg-type]
    for begun in (0, 4):  # the last of them counts
        assert early.ask(post(begun, can_fuse=False), LONG) == Answer(False, CANNOT_FUSE, 1)
    waiting: list[Answer] = []
    thread = threading.Thread(target=lambda: waiting.append(also.ask(post(4), LONG)), daemon=True)
    thread.start()
    kept = VoteBoard(Group(0, 3, store))  # type: ignore[arg-type]
    begin = time.monotonic()
    assert kept.ask(post(4), LONG) == Answer(False, CANNOT_FUSE, 1)
    thread.join(LONG / 2)
    assert waiting == [Answer(False, CANNOT_FUSE, 1)]
    assert time.monotonic() - begin < LONG / 2
    answers = at_once(*(lambda b=b: b.ask(post(6), LONG) for b in (kept, early, also)))  # type: ignore[misc]
    assert all(a.fused for a in answers)


def test_a_lock_is_waited_for_until_the_groups_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the wait for other ranks is: one that is busy for a moment is no error."""
    where = make(2)
    with where[1]._lock(LONG) as words:
        first = threading.Thread(target=where[0].ask, args=(post(4), 0.01), daemon=True)
        first.start()
        first.join(0.3)
        assert first.is_alive() and not words[where[0]._own + vote_rows._POSTS]
    first.join(LONG / 2)
    assert not first.is_alive() and words[where[0]._own + vote_rows._POSTS] == 1
    monkeypatch.setattr(boards, "get_timeout", lambda group: 0.2)
    said = "^agree on a graph: rank 0 of group 'g' waited 0.2 s for the lock of the ranks' board"
    with where[1]._lock(LONG), pytest.raises(WeftError, match=said):
        where[0].ask(post(6), LONG)


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_question_counts_on_all_ranks_or_on_none(late: bool) -> None:
    where = make(2)
    real = where[0]._answer

    def interrupts() -> Answer | None:
        where[0]._answer = real  # type: ignore[method-assign]
        if late:  # all have the answer
            assert where[1].ask(post(4), LONG).fused
        raise KeyboardInterrupt

    where[0]._answer = interrupts  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        where[0].ask(post(4), LONG)
    assert turns(where) == [int(late)] * 2
    if not late:  # nobody counts on what was taken back
        assert where[1].ask(post(4), 0.2) == Answer(False, LATE, 0)
    assert [a.fused for a in ask_all(where, [post(6)] * 2)] == [True] * 2


def test_ctrl_c_just_after_a_lock_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    where = make(2)
    real = fcntl.flock

    def interrupts(fd: int, how: int) -> None:
        monkeypatch.undo()
        real(fd, how)
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupts)
    with pytest.raises(KeyboardInterrupt):
        where[0].ask(post(4), LONG)
    assert where[1].ask(post(4), 0.2) == Answer(False, LATE, 0)


def test_a_rank_that_is_interrupted_in_the_midst_of_its_post_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = make(2)
    with monkeypatch.context() as patch:
        patch.setattr(where[0], "_meet", Mock(side_effect=KeyboardInterrupt))
        patch.setattr(where[0], "_spread", lambda words: None)
        with pytest.raises(KeyboardInterrupt):
            where[0].ask(post(4), LONG)
    assert where[1].ask(post(4), 0.1) == Answer(False, LATE, 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("done", [False, True])
def test_a_board_whose_making_an_exception_has_ended_is_made_all_the_same(
    rank: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    where = [VoteBoard(Group(r, 2, store)) for r in range(2)]  # type: ignore[arg-type]
    real, asked = VoteBoard._asked, [0]

    def interrupts(board: VoteBoard, question: Any) -> Any:
        asked[0] += 1
        if done or asked[0] < 2:  # it was asked for, but nobody has heard the answer
            answer = real(board, question)
        if asked[0] < 2:
            return answer
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(VoteBoard, "_asked", interrupts)
        with pytest.raises(KeyboardInterrupt):
            where[rank].attached()
    assert where[1 - rank].attached() and where[rank].attached()
    assert [a.fused for a in ask_all(where, [post(4)] * 2)] == [True] * 2


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_board_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    where = make(2)
    assert open_files() > before
    del where
    assert open_files() == before
    store = dist.HashStore()
    kept, other = (VoteBoard(Group(rank, 2, store)) for rank in range(2))  # type: ignore[arg-type]
    assert kept.attached()
    held = open_files()
    kept._file.words[0] += 1  # type: ignore[index]
    assert not other.attached()
    until = time.monotonic() + 10
    while open_files() != held:  # the thread that offers lets go of its part
        assert time.monotonic() < until


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
    store = dist.HashStore()
    where = [VoteBoard(Group(rank, 3, store)) for rank in range(3)]  # type: ignore[arg-type]
    assert where[0].attached() and where[2].attached()
    there = {**host_identity(), "boot": "another", "host": "there"}
    monkeypatch.setattr(board_file, "host_identity", lambda: there)
    begin = time.monotonic()
    answers = ask_all(where, [post(4)] * 3, timeout=LONG)
    assert answers == [Answer(False, NO_BOARD, 1)] * 3
    assert time.monotonic() - begin < LONG / 2


def test_what_stands_after_a_signature() -> None:
    where = make(2)
    where[0].tell(8, ["a gather"])
    where[0].ask(post(0, signature=8, can_fuse=False), 1.0)
    assert where[1].told(0) == ["a gather"]
    assert where[1].told(1) is None


@pytest.mark.parametrize("count", [2, 0])
def test_other_numbers(count: int) -> None:
    """All ranks hear of it, also one that comes later; and then vote as if nothing had been posted."""
    where = make(3)
    votes = [Vote(4, count, 7 ^ n, True, 5 << 32 | n) for n in (1, 2)]
    answers = [*ask_all(where[:2], votes), where[2].ask(votes[0], LONG)]
    assert {a.why for a in answers} == {LEFT} and all(b.numbers_differ for b in where)
    for begun in (4, 6):
        assert all(a.fused for a in ask_all(where, [Vote(begun, count, 7, True, 5 << 32)] * 3))


@pytest.mark.parametrize("numbers", [0, 6 << 32, 5 << 32 | 1])
def test_numbers_of_another_graph(numbers: int) -> None:
    """Or the same numbers."""
    answers = ask_all(make(2), [Vote(4, 2, 7, True, 5 << 32 | 1), Vote(4, 2, 8, True, numbers)])
    assert {a.why for a in answers} == {ANOTHER_GRAPH}


def test_other_numbers_of_a_rank_that_has_gone_on() -> None:
    """It would wait in vain if this one raised."""
    where = make(2)
    assert where[0].ask(Vote(4, 2, 7, True, 5 << 32 | 1), 0.05).why == LATE
    assert where[1].ask(Vote(4, 2, 8, True, 5 << 32 | 2), LONG).why == ANOTHER_GRAPH
    answers = ask_all(where, [Vote(6, 2, n, True, 5 << 32 | n) for n in (1, 2)])
    assert {a.why for a in answers} == {LEFT}
