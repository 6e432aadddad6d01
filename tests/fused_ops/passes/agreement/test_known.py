"""Ranks that have agreed for long do not ask before graphs that they know; who differs is named on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_board import at_once, make, post, stores, turns
from weft.fused_ops.passes.agreement.votes import known, vote_rows
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.fused_ops.passes.agreement.votes.vote_rows import (
    _RUN,
    ABSENT,
    ANOTHER_GRAPH,
    CANNOT_FUSE,
    LATE,
    LEFT,
    NOTHING,
    PASSED_BY,
    Answer,
    ring_of,
    row_of,
)

__all__ = ["stores"]  # the fixture


TRUSTED = 6
#: Of a graph that runs without asking.
UNASKED = Answer(True, 99)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks trust each other after a few graphs."""
    monkeypatch.setattr(vote_rows, "TRUSTED", TRUSTED)


def ask(
    where: VoteBoard,
    signature: int = 7,
    *,
    begun: int = 0,
    count: int = 2,
    can_fuse: bool = True,
    fused: bool = True,
    timeout: float = 10.0,
) -> Answer:
    """As a graph does: without asking if that is allowed.

    ``fused``: whether anything in the graph is.
    """
    vote = post(begun, count, signature, can_fuse and fused)
    if vote.can_fuse and where.known.run(signature, count, begun):
        return UNASKED
    answer = where.ask(vote, timeout)
    if answer.fused:
        where.known.learn(signature)
    return answer


def met(count: int, runs: int = 12) -> list[VoteBoard]:
    """Ranks that have run the same graph so often, and another one before."""
    where = make(count)
    for signature in (9, *[7] * runs):
        answers = at_once(*(lambda b=b, s=signature: ask(b, s) for b in where))  # type: ignore[misc]
        assert all(a.fused for a in answers)
    return where


@pytest.mark.parametrize("count", [2, 3])
def test_who_is_early_does_not_wait_and_the_others_find_what_it_ran(count: int) -> None:
    where = met(count)
    before = turns(where)[0]
    for _ in range(10):
        assert ask(where[0]) == UNASKED
    for rank in range(1, count):
        for _ in range(10):
            assert ask(where[rank]).fused
    assert turns(where) == [before + 10] * count
    assert ask(where[1]) == UNASKED


def test_one_rank_by_itself() -> None:
    (alone,) = met(1)
    assert [ask(alone) for _ in range(3)] == [UNASKED] * 3
    assert ask(alone, 8) == Answer(True, NOTHING, 0)


def test_all_ask_before_the_ranks_have_agreed_often_enough() -> None:
    where = met(2, runs=4)
    assert ask(where[0], timeout=0.05) == Answer(False, LATE, 1)
    assert ask(where[1]) == Answer(False, LATE, 1)
    # As often again once one was late. That has run over the backend on both.
    for _ in range(TRUSTED):
        answers = at_once(*(lambda b=b: ask(b, begun=2) for b in where))  # type: ignore[misc]
        assert all(a == Answer(True, NOTHING, a.peer) for a in answers)
    assert ask(where[0], begun=2) == UNASKED


def test_a_graph_that_is_new_to_the_ranks_is_voted_on() -> None:
    where = met(2)
    assert ask(where[0], 8, timeout=0.05) == Answer(False, LATE, 1)


def test_ranks_that_have_run_different_graphs_ask_for_good() -> None:
    where = met(2)
    answers = at_once(lambda: where[0].ask(post(0), 10.0), lambda: ask(where[1], 8))
    assert [a.why for a in answers] == [ANOTHER_GRAPH] * 2
    for _ in range(3 * TRUSTED):
        answers = at_once(*(lambda b=b: ask(b, begun=2) for b in where))  # type: ignore[misc]
        assert all(a == Answer(True, NOTHING, a.peer) for a in answers)


def test_a_rank_that_was_late_as_it_ran_something_else_has_run_a_different_graph() -> None:
    where = met(2)
    missed = post(0)
    assert where[0].ask(missed, 0.05).why == LATE
    ask(where[1], 5, begun=2, fused=False)
    for _ in range(3 * TRUSTED):
        answers = at_once(*(lambda b=b: ask(b, begun=4) for b in where))  # type: ignore[misc]
        assert all(a == Answer(True, NOTHING, a.peer) for a in answers)


def test_a_rank_that_was_only_late_has_run_the_same_graphs() -> None:
    """It compiles for long, and the hosts of others do not wait for what they have launched."""
    where = met(2)
    for begun, why in ((0, LATE), (2, ABSENT)):
        vote = post(begun, signature=8)
        assert where[0].ask(vote, 0.05) == Answer(False, why, 1)
    for begun in (0, 2):
        assert where[1].ask(post(begun, signature=8), 10.0).why == LATE
    for _ in range(TRUSTED):
        assert all(a.fused for a in at_once(*(lambda b=b: ask(b, begun=4) for b in where)))  # type: ignore[misc]
    assert ask(where[0], begun=4) == UNASKED


def test_a_rank_that_several_waited_for_was_only_late() -> None:
    where = met(3)
    vote = post(0, signature=8)
    for rank in (0, 2):
        assert where[rank].ask(vote, 0.05).why == LATE
    assert where[1].ask(vote, 10.0).why == LATE
    assert where[1].ask(post(2, signature=8), 0.05).why == LATE
    for rank in (0, 2):
        assert where[rank].ask(post(2, signature=8), 10.0).why == LATE
    for _ in range(TRUSTED):
        assert all(a.fused for a in at_once(*(lambda b=b: ask(b, begun=4) for b in where)))  # type: ignore[misc]
    assert ask(where[0], begun=4) == UNASKED


def test_ranks_that_change_together_vote_where_they_do() -> None:
    where = met(2)
    for _ in range(5):
        assert ask(where[0]) == UNASKED
    late: list[Answer] = []

    def follow() -> None:
        time.sleep(0.05)
        late.extend([ask(where[1]) for _ in range(5)] + [ask(where[1], 8)])

    first, _ = at_once(lambda: ask(where[0], 8), follow)
    assert first == Answer(True, NOTHING, 0)
    assert all(a.fused for a in late)


@pytest.mark.parametrize("can_fuse", [True, False])
def test_who_comes_with_something_else_before_anybody_runs_gets_it_plain(can_fuse: bool) -> None:
    where = met(2)
    assert ask(where[0]) == UNASKED
    assert ask(where[1]).fused
    answers: list[Answer] = []

    def second() -> None:
        time.sleep(0.05)
        answers.append(ask(where[0]))

    first, _ = at_once(lambda: ask(where[1], 8, can_fuse=can_fuse), second)
    assert (first.fused, [a.fused for a in answers]) == (False, [False])
    assert {first.why, answers[0].why} == {ANOTHER_GRAPH} if can_fuse else {CANNOT_FUSE, ANOTHER_GRAPH}


OTHERS: list[tuple[str, Callable[[VoteBoard], Answer]]] = [
    ("another graph", lambda b: ask(b, 8)),
    ("the same unfused", lambda b: ask(b, can_fuse=False)),
    ("after its collectives", lambda b: ask(b, begun=2)),
    ("within them", lambda b: ask(b, 8, count=3, can_fuse=False)),
]


@pytest.mark.parametrize("other", [o for _, o in OTHERS], ids=[n for n, _ in OTHERS])
def test_who_comes_with_something_else_where_others_run_already_is_named_on_all(
    other: Callable[[VoteBoard], Answer],
) -> None:
    where = met(3)
    for _ in range(3):
        assert ask(where[0]) == UNASKED
    assert ask(where[1]).fused
    assert ask(where[2]).fused
    assert other(where[2]) == Answer(False, LEFT, 2)
    # The others hear of it, whether they have been there or not. Then all of them vote, for good.
    assert ask(where[0]) == ask(where[1]) == Answer(False, LEFT, 2)
    assert len(set(turns(where))) == 1
    for _ in range(3 * TRUSTED):
        answers = at_once(*(lambda b=b: ask(b) for b in where))  # type: ignore[misc]
        assert [a.why for a in answers] == [NOTHING] * 3


def test_who_waits_for_a_rank_that_leaves_hears_of_it_at_once() -> None:
    where = met(2)
    for _ in range(3):
        assert ask(where[0]) == UNASKED
    begin = time.monotonic()
    waiting, left = at_once(
        lambda: ask(where[0], 4, timeout=60.0), lambda: (time.sleep(0.1), ask(where[1], 8))[1]
    )
    assert waiting == left == Answer(False, LEFT, 1)
    assert time.monotonic() - begin < 10


def test_graphs_that_nobody_fuses_are_no_obstacle() -> None:
    """After a graph that runs fused, each rank has one whose collectives are left alone."""
    where = make(2)
    begun = [0, 0]

    def step(rank: int) -> list[Answer]:
        answers = [ask(where[rank], begun=begun[rank])]
        answers.append(ask(where[rank], 5, begun=begun[rank], count=3, fused=False))
        begun[rank] += 3
        return answers

    for _ in range(12):
        assert [a[0].fused for a in at_once(lambda: step(0), lambda: step(1))] == [True] * 2
    votes = [b._votes(r) for r, b in enumerate(where)]
    for rank in (0, 1):
        for _ in range(5):
            assert step(rank) == [UNASKED, Answer(False, CANNOT_FUSE, rank)]
    # Those of the graphs that nobody fuses, which wait for nobody.
    assert [b._votes(r) for r, b in enumerate(where)] == [n + 5 for n in votes]


@pytest.mark.parametrize("waits", [False, True])
def test_a_graph_that_nobody_fuses_is_no_way_past_one_that_others_run_fused(waits: bool) -> None:
    where = met(2)
    for b in where:  # in place of the last one's collectives, on both
        assert ask(b, 5, begun=0, count=2, fused=False).why == CANNOT_FUSE
    if waits:
        first, second = at_once(
            lambda: ask(where[0], 8, begun=2),
            lambda: (time.sleep(0.05), ask(where[1], 5, begun=2, fused=False))[1],
        )
        assert [first.why, second.why] == [ANOTHER_GRAPH, CANNOT_FUSE]
    else:
        assert ask(where[0], begun=2) == UNASKED
        assert ask(where[1], 5, begun=2, fused=False) == Answer(False, LEFT, 1)


def test_a_graph_that_nobody_fuses_is_seen_by_who_comes_with_one_that_all_know() -> None:
    """Else its ops would wait for a rank that is in the backend's collectives."""
    where = met(2)
    for b in where:
        ask(b, 5, begun=0, count=2, fused=False)
    assert ask(where[0], 5, begun=2, fused=False).why == CANNOT_FUSE
    assert ask(where[1], begun=2) == Answer(False, ANOTHER_GRAPH, 0)


def test_a_graph_whose_ops_run_unfused_later_is_voted_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unfused = 0
    monkeypatch.setattr(known, "unfused_calls", lambda: unfused)
    where = met(2)
    assert ask(where[0]) == ask(where[0]) == UNASKED
    unfused = 1  # during the last run
    assert ask(where[0], timeout=0.05) == Answer(False, LATE, 1)


def test_a_graph_that_others_have_passed_by_runs_plain() -> None:
    where = make(2)
    for begun in range(0, 24, 2):  # each graph comes after two plain collectives
        at_once(*(lambda b=b, n=begun: ask(b, begun=n) for b in where))  # type: ignore[misc]
    assert ask(where[0], begun=24) == UNASKED
    assert ask(where[1], 8, begun=22) == Answer(False, PASSED_BY, 0)
    assert ask(where[1], begun=24).fused


class Meanwhile:
    """The board's words, with something that happens as soon as a rank has written its turn."""

    def __init__(self, where: VoteBoard, happens: Callable[[], None]) -> None:
        assert where._file.words is not None
        self._words, self._turn, self._happens = where._file.words, row_of(where.rank) + _RUN, [happens]
        where._file.words = self  # type: ignore[assignment]

    def __getitem__(self, at: int | slice) -> Any:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        if at == self._turn and self._happens:
            self._happens.pop()()


@pytest.mark.parametrize("signature", [7, 8])
def test_who_comes_while_another_one_looks_whether_it_may_run(signature: int) -> None:
    """With the same graph both run it, with another one neither does."""
    where = met(2)
    second: list[Answer] = []
    thread = threading.Thread(target=lambda: second.append(where[1].ask(post(0, 2, signature), 10.0)))

    def comes() -> None:
        thread.start()
        time.sleep(0.05)

    Meanwhile(where[0], comes)
    first = ask(where[0])
    thread.join(10)
    assert [first.fused, second[0].fused] == [signature == 7] * 2
    assert len(set(turns(where))) == 1


def test_two_that_know_different_graphs_do_not_both_run() -> None:
    where = met(2)
    found: list[bool] = []
    Meanwhile(where[0], lambda: found.append(where[1].known.run(9, 2, 0)))
    assert ask(where[0]) == UNASKED
    assert found == [False]
    assert ask(where[1], 9) == ask(where[0]) == Answer(False, LEFT, 1)


def test_who_waits_follows_one_that_does_not_ask() -> None:
    """It has waited for a rank that needs not ask."""
    where = met(2)
    missed = post(0)
    waiting = threading.Thread(target=lambda: answers.append(where[0].ask(missed, 10.0)))
    answers: list[Answer] = []
    words = where[1]._file.words
    assert words is not None
    waiting.start()
    time.sleep(0.05)
    assert not answers
    turn = turns(where)[1]
    at = row_of(1) + ring_of(turn)
    words[at], words[at + 1], words[at + 2] = 0, 2, 7  # as ``KnownGraphs.run`` does
    words[row_of(1) + _RUN] = turn + 1
    waiting.join(10)
    assert answers == [Answer(True, NOTHING, 0)]


def test_who_waits_is_waited_with() -> None:
    """Whoever ran without asking would leave it alone with its question."""
    where = met(3)
    where[0].known.forget()

    def later(rank: int) -> Answer:
        time.sleep(0.1 * rank)
        return ask(where[rank])

    answers = at_once(lambda: later(0), lambda: later(1), lambda: later(2))
    assert answers == [Answer(True, NOTHING, rank) for rank in range(3)]


def test_nobody_runs_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_rows, "FARTHEST", 5)
    where = met(2)
    for _ in range(5):
        assert ask(where[0]) == UNASKED
    waiting: list[Answer] = []
    thread = threading.Thread(target=lambda: waiting.append(ask(where[0])), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not waiting
    for _ in range(6):  # the others find what has run, and meet it there
        assert ask(where[1]) == Answer(True, NOTHING, 1)
    thread.join(10)
    assert waiting == [Answer(True, NOTHING, 0)]


def test_what_goes_over_the_backend_is_voted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody notices what another rank meets it with."""
    calls = [0]

    def counted() -> int:
        calls[0] += 1
        return calls[0]

    monkeypatch.setattr(known, "unfused_calls", counted)
    where = met(2)
    assert ask(where[0], timeout=0.05).why == LATE
