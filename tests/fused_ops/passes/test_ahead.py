"""Ranks that have agreed for long run ahead of each other; who comes with something else is named on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from test_board import at_once, make, stores
from weft.fused_ops.passes.agreement.votes import foresight, lead
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.fused_ops.passes.agreement.votes.foresight import Foresight
from weft.fused_ops.passes.agreement.votes.vote import (
    AHEAD,
    ALL_AHEAD,
    ANOTHER_GRAPH,
    BACKWARDS_AHEAD,
    CANNOT_FUSE,
    LATE,
    LEFT,
    NONE_AHEAD,
    NOTHING,
    PASSED_BY,
    Answer,
    Vote,
)
from weft.fused_ops.passes.agreement.votes.vote_rows import _RUN, ring_of, row_of

__all__ = ["stores"]  # the fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks trust each other after a few graphs, and need not meet."""
    monkeypatch.setattr(foresight, "LIMITS", foresight.AheadLimits(trusted=6, likely=2, meeting=1000))


def post(
    where: VoteBoard,
    signature: int = 7,
    *,
    can_fuse: bool = True,
    ahead: int = ALL_AHEAD,
    needs: int = ALL_AHEAD,
    begun: int = 0,
    count: int = 2,
) -> Vote:
    return Vote(where.turns, begun, count, signature, can_fuse, ahead, needs)


def ask(where: VoteBoard, signature: int = 7, *, timeout: float = 10.0, **named: int) -> Answer:
    """As a graph does: without the lock if that is allowed."""
    vote = post(where, signature, **named)  # type: ignore[arg-type]
    if vote.leads and (answer := where.lead.run(signature, vote.count, vote.begun, vote.needs)):
        return answer
    return where.ask(vote, lambda: timeout)


def met(count: int, turns: int = 12) -> list[VoteBoard]:
    """Ranks that have run the same graph so often."""
    where = make(count)
    for _ in range(turns):
        answers = at_once(*(lambda b=b: ask(b) for b in where))  # type: ignore[misc]
        assert all(a.fused for a in answers)
    return where


@pytest.mark.parametrize("count", [2, 3])
def test_who_is_early_does_not_wait_and_the_others_find_what_it_ran(count: int) -> None:
    where = met(count)
    turns = where[0].turns
    for _ in range(10):
        assert ask(where[0]) == Answer(True, AHEAD, 0)
    for rank in range(1, count):
        for _ in range(10):
            assert ask(where[rank]).fused
    assert [b.turns for b in where] == [turns + 10] * count
    assert ask(where[1]) == Answer(True, AHEAD, 1)


def test_one_rank_by_itself() -> None:
    (alone,) = met(1)
    assert [ask(alone) for _ in range(3)] == [Answer(True, NOTHING, 0)] * 3


def test_nobody_runs_ahead_before_the_ranks_have_agreed_often_enough() -> None:
    where = met(2, turns=4)
    assert ask(where[0], timeout=0.05) == Answer(False, LATE, 1)
    # It takes twice as many once they have differed. What was late has run over the backend on both.
    at_once(*(lambda b=b: ask(b, 8, begun=2) for b in where))  # type: ignore[misc]
    for _ in range(2 * foresight.LIMITS.trusted - 1):
        answers = at_once(*(lambda b=b: ask(b, begun=2) for b in where))  # type: ignore[misc]
        assert all(a == Answer(True, NOTHING, a.peer) for a in answers)


def test_ranks_that_change_together_vote_where_they_do() -> None:
    where = met(2)
    for _ in range(5):
        assert ask(where[0]).why == AHEAD
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
    assert ask(where[0]).why == AHEAD
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
    ("behind its collectives", lambda b: ask(b, begun=2)),
    ("within them", lambda b: ask(b, 8, count=3, can_fuse=False)),
]


@pytest.mark.parametrize("other", [o for _, o in OTHERS], ids=[n for n, _ in OTHERS])
def test_who_comes_with_something_else_where_others_run_already_is_named_on_all(
    other: Callable[[VoteBoard], Answer],
) -> None:
    where = met(3)
    for _ in range(3):
        assert ask(where[0]).why == AHEAD
    assert ask(where[1]).fused
    assert ask(where[2]).fused
    assert other(where[2]) == Answer(False, LEFT, 2)
    # The others hear of it, whether they have been there or not. Then all of them vote, and none runs ahead any more.
    assert ask(where[0]) == ask(where[1]) == Answer(False, LEFT, 2)
    assert len({b.turns for b in where}) == 1
    for _ in range(3 * foresight.LIMITS.trusted):
        answers = at_once(*(lambda b=b: ask(b) for b in where))  # type: ignore[misc]
        assert [a.why for a in answers] == [NOTHING] * 3


def test_who_waits_for_a_rank_that_leaves_hears_of_it_at_once() -> None:
    where = met(2)
    for _ in range(3):
        assert ask(where[0]).why == AHEAD
    begin = time.monotonic()
    waiting, left = at_once(
        lambda: ask(where[0], 9, timeout=60.0), lambda: (time.sleep(0.1), ask(where[1], 8))[1]
    )
    assert waiting == left == Answer(False, LEFT, 1)
    assert time.monotonic() - begin < 10


def test_graphs_that_nobody_fuses_are_no_obstacle() -> None:
    """Behind a graph that runs fused, each rank has one whose collectives are left alone."""
    where = make(2)
    begun = [0, 0]

    def step(rank: int) -> list[Answer]:
        answers = [ask(where[rank], begun=begun[rank])]
        answers.append(ask(where[rank], 5, begun=begun[rank], count=3, can_fuse=False))
        begun[rank] += 3
        return answers

    for _ in range(12):
        assert [a[0].fused for a in at_once(lambda: step(0), lambda: step(1))] == [True] * 2
    for _ in range(5):
        assert [a.why for a in step(0)] == [AHEAD, CANNOT_FUSE]
    for _ in range(5):
        assert [a.why for a in step(1)] == [NOTHING, CANNOT_FUSE]


def test_a_graph_that_others_have_passed_by_runs_plain() -> None:
    where = make(2)
    for begun in range(0, 24, 2):  # each graph comes behind two plain collectives
        at_once(*(lambda b=b, n=begun: ask(b, begun=n) for b in where))  # type: ignore[misc]
    assert ask(where[0], begun=24).why == AHEAD
    assert ask(where[1], 8, begun=22) == Answer(False, PASSED_BY, 0)
    assert ask(where[1], begun=24).fused


def test_nobody_runs_ahead_of_a_rank_that_wants_to_wait() -> None:
    where = met(2)
    assert all(a.fused for a in at_once(lambda: ask(where[0]), lambda: ask(where[1], ahead=NONE_AHEAD)))
    assert ask(where[0], timeout=0.05).why == LATE


def test_ranks_run_ahead_at_backward_graphs_alone() -> None:
    where = make(2)
    forward, backward = (partial(ask, ahead=BACKWARDS_AHEAD, needs=n) for n in (ALL_AHEAD, BACKWARDS_AHEAD))
    for _ in range(8):
        for graph in (forward, partial(backward, signature=8)):
            assert all(a.fused for a in at_once(*(partial(graph, b) for b in where)))
    answers = at_once(lambda: forward(where[0]), lambda: (time.sleep(0.05), forward(where[1]))[1])
    assert answers == [Answer(True, NOTHING, 0), Answer(True, NOTHING, 1)]
    assert backward(where[0], 8).why == AHEAD
    assert backward(where[1], 8) == Answer(True, NOTHING, 1)
    # A rank that waits at each graph is waited for at each.
    at_once(lambda: forward(where[0]), lambda: ask(where[1], ahead=NONE_AHEAD))
    assert backward(where[0], 8, timeout=0.05).why == LATE


class Meanwhile:
    """The board's words, with something that happens as soon as a rank has written its turn."""

    def __init__(self, where: VoteBoard, happens: Callable[[], None]) -> None:
        assert where._words is not None
        self._words, self._turn, self._happens = where._words, row_of(where.rank) + _RUN, [happens]
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
    thread = threading.Thread(
        target=lambda: second.append(where[1].ask(post(where[1], signature), lambda: 10.0))
    )

    def comes() -> None:
        thread.start()
        time.sleep(0.05)

    Meanwhile(where[0], comes)
    first = ask(where[0])
    thread.join(10)
    assert [first.fused, second[0].fused] == [signature == 7] * 2
    assert where[0].turns == where[1].turns


def test_two_that_foresee_different_graphs_do_not_both_run() -> None:
    where = met(2)
    where[1].lead.foresight = other = Foresight()
    for _ in range(4):
        other.ran((8, 2, 0), 0, 0.0, ahead=False)
    found: list[Answer | None] = []
    Meanwhile(where[0], lambda: found.append(where[1].lead.run(8, 2, 0, ALL_AHEAD)))
    assert ask(where[0]) == Answer(True, AHEAD, 0)
    assert found == [None]
    assert ask(where[1], 8) == ask(where[0]) == Answer(False, LEFT, 1)


def test_who_waits_follows_one_that_runs_ahead() -> None:
    """It has waited for a rank that needs not ask."""
    where = met(2)
    waiting = threading.Thread(target=lambda: answers.append(where[0].ask(post(where[0]), lambda: 10.0)))
    answers: list[Answer] = []
    where[0].lead.foresight = Foresight()
    where[1].attached()
    words = where[1]._words
    assert words is not None
    waiting.start()
    time.sleep(0.05)
    assert not answers
    turn = where[1].turns
    at = row_of(1) + ring_of(turn)
    words[at], words[at + 1], words[at + 2] = 0, 2, 7  # as ``Lead.run`` does
    words[row_of(1) + _RUN] = turn + 1
    waiting.join(10)
    assert answers == [Answer(True, NOTHING, 0)]


def test_who_waits_is_waited_with() -> None:
    """Whoever ran ahead of it would leave it alone with its question."""
    where = met(3)
    where[0].lead.foresight = Foresight()

    def later(rank: int) -> Answer:
        time.sleep(0.1 * rank)
        return ask(where[rank])

    answers = at_once(lambda: later(0), lambda: later(1), lambda: later(2))
    assert answers == [Answer(True, NOTHING, rank) for rank in range(3)]


def test_nobody_runs_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "LIMITS", foresight.LIMITS._replace(farthest=5))
    where = met(2)
    for _ in range(5):
        assert ask(where[0]).why == AHEAD
    assert ask(where[0], timeout=0.05).why == LATE


def test_what_goes_over_the_backend_does_not_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody notices what another rank meets it with."""
    calls = [0]

    def counted() -> int:
        calls[0] += 1
        return calls[0]

    monkeypatch.setattr(lead, "unfused_calls", counted)
    where = met(2)
    assert ask(where[0], timeout=0.05).why == LATE


def test_a_thread_that_was_overtaken_has_not_left() -> None:
    where = met(2)
    stale = post(where[1], 8)
    for rank in (0, 1):
        assert ask(where[rank]).fused
    assert where[1].ask(stale, lambda: 0.05) == Answer(False, LATE, 0)


def sequence(seen: Foresight, steps: str, times: int, pauses: dict[str, float]) -> list[bool]:
    """Whether each of them was foreseen."""
    foreseen = []
    for _ in range(times):
        for at, name in enumerate(steps):
            step = (ord(name), 1, 0)
            foreseen.append(seen.expects(step, 0))
            seen.ran(step, 0, seen.last + pauses.get(f"{at}", 0.001), ahead=foreseen[-1])
    return foreseen


def test_sequences_are_foreseen_and_ranks_meet_at_the_longest_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "LIMITS", foresight.AheadLimits(meeting=16))
    for steps in ("F" * 8 + "B" * 8, "F" * 40 + "B" * 40, "abcabcd" * 3 + "x"):
        seen = Foresight()
        sequence(seen, steps, 4, {"3": 0.1})
        foreseen = sequence(seen, steps, 6, {"3": 0.1})
        missed = [i % len(steps) for i, f in enumerate(foreseen) if not f]
        assert missed == [3] * 6, missed
        # Something that comes once costs a few votes, not the sequence.
        sequence(seen, "?", 1, {})
        assert sum(not f for f in sequence(seen, steps, 6, {"3": 0.1})) <= len(steps) + 6 + 9


def test_what_never_repeats_itself_costs_little() -> None:
    """As graphs of sizes that are new in each step, which are learned by default."""
    compared = 0

    class Counted(tuple[int, int, int]):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __ne__ = object.__ne__
        __hash__ = tuple.__hash__

    seen = Foresight()
    for i in range(5000):
        seen.ran(Counted((i, 1, 0)), 0, 0.0, ahead=False)
    assert compared < 5000
    assert sequence(seen, "abc", 20, {})[30:] == [True] * 30


@pytest.mark.parametrize("length", [1500, 2047, 2048, 2049, 3000])
def test_long_sequences(length: int) -> None:
    seen = Foresight()
    foreseen = sequence(seen, "".join(map(chr, range(1000, 1000 + length))), 5, {})
    assert (foreseen[-length:].count(False) <= 3) is (length < 2048)  # they meet in between


def test_one_graph_again_and_again_meets_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "LIMITS", foresight.LIMITS._replace(meeting=16))
    seen = Foresight()
    foreseen = sequence(seen, "d", 200, {})[10:]
    assert 15 <= len(foreseen) / foreseen.count(False) <= 19
