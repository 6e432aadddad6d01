"""Errors: which call they name, and that they travel between processes."""

from __future__ import annotations

import inspect
import pickle
import random
from dataclasses import replace

import pytest
from weft import symm_mem
from weft.symm_mem.call_site import Site, call_site, text
from weft.symm_mem.errors import PeerWait, WaitOutcome
from weft.symm_mem.failure.call_log import CallLog, poison_on_error, running
from weft.symm_mem.workspace import Workspace

_MODEL = compile("f()\n" * 10_001, "model.py", "exec").replace(co_firstlineno=0)
WAIT = PeerWait("op", "0", 1, 2, "flag 3", 4, "model.py:12")
_STARTS = {line: start for start, _, line in _MODEL.co_lines()}


def at(line: int) -> Site:
    """In a model.py whose lines count from 0."""
    return _MODEL, _STARTS[line]


def test_the_count_of_a_use_tells_which_call_it_was() -> None:
    order = random.Random()
    calls = CallLog(lambda: 7.0, replayed=False)
    made: tuple[list[int], list[int]] = ([], [])
    for line in range(200):
        buffer = order.randrange(2)
        calls.begins(f"op {line % 3}", at(line))
        calls.takes(buffer)
        made[buffer].append(line)
    for buffer, lines in enumerate(made):
        for use, line in enumerate(lines, start=1):
            assert calls.find(buffer, use) == (f"op {line % 3}", f"model.py:{line}")
    last = ("op 1", "model.py:199")
    assert calls.find(None, 5) == last, "where buffers are not counted it is the last call"
    assert calls.find(0, len(made[0]) + 7) == last, "a use that was never taken"
    calls.reset_state()
    calls.begins("op x", at(500))
    calls.takes(1)
    assert calls.find(1, 1) == ("op x", "model.py:500"), "a reset counts from 0 again"


def test_replays_of_a_graph_repeat_its_calls() -> None:
    deadline = [0.5]
    calls = CallLog(lambda: deadline[0], replayed=True)
    for line, buffer in enumerate([1, 0, 1, 1]):
        calls.begins("op", at(line))
        calls.takes(buffer)
    deadline[0] = 300.0
    assert calls.seconds == 0.5, "a graph keeps the deadline that it was captured with"
    for replay in range(5):
        assert [calls.find(1, 3 * replay + use) for use in (1, 2, 3)] == [
            ("op", f"model.py:{line}") for line in (0, 2, 3)
        ]
        assert calls.find(0, replay + 1) == ("op", "model.py:1")
    calls.reset_state()
    assert calls.find(1, 2) == ("op", "model.py:2"), "a reset leaves a graph's calls as they are"


def pushes(order: random.Random, count: int) -> list[tuple[int, ...]]:
    return [tuple(order.choice((1, 3, 8)) for _ in range(order.randint(1, 3))) for _ in range(count)]


def uses_of(block: int, grids: list[tuple[int, ...]]) -> list[int]:
    """For each use of a block the call, by number, that it belongs to."""
    return [call for call, launches in enumerate(grids) for grid in launches if block < grid]


def test_pushes_are_told_apart_by_block_and_count() -> None:
    grids = pushes(random.Random(), 300)
    calls = CallLog(lambda: 7.0, replayed=False)
    for line, launches in enumerate(grids):
        calls.begins(f"op {line % 3}", at(line), launches)
    for block in (0, 1, 2, 5, 7):
        uses = uses_of(block, grids)
        for use, line in enumerate(uses, start=1):
            assert calls.find(block, use) == (f"op {line % 3}", f"model.py:{line}")
        assert calls.find(block, len(uses) + 1) == ("op 2", "model.py:299"), "never launched"
    assert calls.find(8, 1) == ("op 2", "model.py:299")
    calls.reset_state()
    calls.begins("op x", at(500), (2,))
    calls.begins("op y", at(501), (1,))
    assert calls.find(1, 1) == ("op x", "model.py:500"), "a reset counts from 0 again"


def test_replays_repeat_pushes() -> None:
    grids = [*pushes(random.Random(), 20), (8,)]
    calls = CallLog(lambda: 7.0, replayed=True)
    for line, launches in enumerate(grids):
        calls.begins("op", at(line), launches)
    calls.reset_state()
    for block in (0, 2, 7):
        uses = uses_of(block, grids)
        for use, line in enumerate(3 * uses, start=1):
            assert calls.find(block, use) == ("op", f"model.py:{line}")


def test_old_calls_are_forgotten_and_never_mistaken() -> None:
    calls = CallLog(lambda: 1.0, replayed=False)
    for line in range(10000):
        calls.begins("op", at(line))
        calls.takes(0)
    assert calls.find(0, 9000) == ("op", "model.py:8999")
    assert calls.find(0, 3) == ("op", "model.py:9999")
    calls = CallLog(lambda: 1.0, replayed=False)
    for line in range(10000):
        calls.begins("push", at(line), (4, 2))
    assert calls.find(3, 9000) == ("push", "model.py:8999")
    assert calls.find(1, 18001) == ("push", "model.py:9000")
    assert calls.find(1, 3) == ("push", "model.py:9999")


@pytest.mark.parametrize(
    "error",
    [
        symm_mem.PeerTimeout(WAIT, WaitOutcome(5, 0.25)),
        symm_mem.PeerTimeout(replace(WAIT, site=None), WaitOutcome(5, 0.25, ended=True)),
        symm_mem.PeerTimeout(WAIT, WaitOutcome(5, 0.25, blames=7)),
        symm_mem.RankMismatch("call 3", "0", 1, "this", "that"),
        symm_mem.CallAbandoned("op", "0", 1, "MemoryError", "model.py:12"),
        symm_mem.HeapUnavailable("no heap"),
    ],
)
def test_errors_travel_and_come_again(error: symm_mem.WeftError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), error.again()):
        assert other is not error and type(other) is type(error)
        assert str(other) == str(error) and vars(other) == vars(error)
    assert getattr(error, "culprit", None) in (None, 1, 2, 7)


def test_the_call_site_is_the_nearest_line_outside() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    assert text(call_site()) == f"{__file__}:{frame.f_lineno}"
    assert text(None) is None


class Broken:
    """What ``whole`` needs of a workspace."""

    cause: BaseException | None = None

    def abandon(self, cause: BaseException) -> None:
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "takes", "breaks"),
    [
        (KeyboardInterrupt(), True, True),
        (MemoryError(), True, True),
        (MemoryError(), False, False),  # nothing was begun
        (symm_mem.RankMismatch("call 1", "0", 1, "this", "that"), True, False),  # every rank has it
    ],
)
def test_an_exception_breaks_what_its_call_has_taken(error: BaseException, takes: bool, breaks: bool) -> None:
    workspace = Broken()

    @poison_on_error
    def call() -> None:
        assert running.inside
        if takes:
            running.workspace = workspace  # type: ignore[assignment]
        raise error

    with pytest.raises(type(error)):
        call()
    assert workspace.cause is (error if breaks else None)
    assert not running.inside and running.workspace is None


def test_behind_what_peers_wait_for_an_exception_breaks_nothing() -> None:
    workspace = Broken()

    @poison_on_error
    def call() -> None:
        running.workspace = workspace  # type: ignore[assignment]
        Workspace.launched(workspace)  # type: ignore[arg-type]
        raise MemoryError

    with pytest.raises(MemoryError):
        call()
    assert workspace.cause is None


def test_an_error_may_be_made_by_names_and_travels_with_what_was_added() -> None:
    error = symm_mem.RankMismatch(what="empty", group="0", rank=1, value="20 bytes", expected="16 bytes")
    plain = symm_mem.WeftError("no room")
    for made in (error, plain):
        made.out_of_step = True
        made.__notes__ = ["in step 3"]
        there = pickle.loads(pickle.dumps(made))
        assert (type(there), str(there), there.out_of_step) == (type(made), str(made), True)
        assert there.__notes__ == ["in step 3"]
        assert str(made.again()) == str(made) and not made.again().out_of_step
