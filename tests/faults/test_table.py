"""Every op, every fault: an error with a name on every rank, in time, no wrong number, and the group comes back."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.cases import CHECKED, STEPS, STRIKES_AT, Seen, expect_whole, kills, story, strike, strikes
from faults.inject import Fault, Gate
from faults.ops import OPS
from ranks import run_ranks
from weft import fused_ops

DEADLINE = 0.4
SLOW = 2.5  # seconds: this many CPU ranks share a few cores with whatever else runs
LONG = 60.0  # seconds: a deadline that nobody waits for, once a rank has ended or given up

SIZES = (2, 3)
CULPRIT = 1
SURVIVABLE = [
    Fault("delay", CULPRIT, STRIKES_AT),
    Fault("delay", CULPRIT, STRIKES_AT, point="before the end"),
    Fault("stop", CULPRIT, STRIKES_AT),
    Fault("skip", CULPRIT, STRIKES_AT),
    Fault("corrupt", CULPRIT, STRIKES_AT),
    Fault("raise", CULPRIT, STRIKES_AT, point="after a push"),
    Fault("raise", CULPRIT, STRIKES_AT, point="before the end"),
    Fault("fork", CULPRIT, STRIKES_AT),
]


def survivable(op: str, size: int) -> list[Fault]:
    """Every second one between three ranks, of whom one hears of the fault from another, and the rest between two."""
    return SURVIVABLE[(list(OPS).index(op) + size) % 2 :: 2]


def expect_timeout(op: str, seen: Seen, deadline: float) -> None:
    """A PeerTimeout that says everything, within the deadline."""
    error = seen.error
    assert error is not None and error["kind"] == "PeerTimeout", seen
    assert error["op"] == op, error
    assert re.search(r"faults/\w*ops\.py:\d+$", error["site"]), error
    words = (
        rf"{op}: rank \d of group '\w+' waited [\d.]+ s for rank \d: "
        r"(flag \d+|'done') of rank \d \(buffer [01]\) is \d+, expected \d+"
        r"(, and its process has ended|, and it has given up( on rank \d)?)? \(called at .*faults/\w*ops\.py:\d+\)"
        r"(; it is late, or has made other calls, or in another order: WEFT_CHECK=1 names the first one that differs)?"
    )
    assert re.fullmatch(words, error["text"]), error
    assert error["culprit"] == CULPRIT, error
    assert seen.seconds < deadline + SLOW, seen
    assert seen.again == error["text"], "a broken workspace refuses in the same words"


def expect_mismatch(op: str, seen: Seen, nth: int) -> None:
    """RankMismatch, with both calls; ``nth``: checked programs before this one, each stopped by a fault."""
    error = seen.error
    assert error is not None and error["kind"] == "RankMismatch" and error["rank"] == CULPRIT, seen
    # The calls before the fault are equal; a call that was left out shows at the next one.
    call = STRIKES_AT + 1 + nth * (STRIKES_AT + 1 + STEPS)
    assert error["text"].startswith(f"call {call} in group"), error
    assert error["text"].count(f"{op}(") == 2 and len(re.findall(r"\w*ops\.py:\d+", error["text"])) == 2, (
        error
    )
    assert seen.seconds < SLOW


def expect_refusals(op: str, seen: Seen) -> None:
    """Of each call of a forked child, naming op, group and both processes."""
    assert len(seen.child) == 2
    for error in seen.child:
        assert error is not None and error["kind"] == "ForkedProcess" and error["op"] == op, seen
        assert error["rank"] == CULPRIT and error["child"] != error["parent"], error
        words = (
            rf"{op}: this process, {error['child']}, was forked from process {error['parent']}, which joined group "
            rf"'0' as rank {CULPRIT}: a forked child is no rank; make what it needs before the fork, use the 'spawn' "
            r"start method, or let the child join a group of its own \(called at .*faults/\w*ops\.py:\d+\)"
        )
        assert re.fullmatch(words, error["text"]), error


def test_every_public_op_is_in_the_table() -> None:
    ops = ("fused_", "one_shot_", "cross_entropy_", "moe_dispatch", "moe_combine")
    assert set(OPS) == {name for name in fused_ops.__all__ if name.startswith(ops)}


def survives(rank: int, size: int, folder: str) -> dict[str, list[Seen]]:
    """Every op and its faults, in one group: a reset brings it back each time."""
    found = {}
    for op in OPS:
        faults = [
            replace(f, seconds=LONG, gate=Gate(f"{folder}/{op} {i}", size - 1))
            for i, f in enumerate(survivable(op, size))
        ]
        found[op] = strikes(rank, size, op, faults, DEADLINE)
    return found


@pytest.fixture(scope="module", params=SIZES, ids="{} ranks".format)
def survived(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank saw, of each op."""
    return run_ranks(survives, request.param, str(tmp_path_factory.mktemp("gates")), fresh=True)


@pytest.mark.parametrize("op", OPS)
def test_faults_that_a_group_survives(survived: list[dict[str, list[Seen]]], op: str) -> None:
    by_rank = [of_ops[op] for of_ops in survived]
    checked = 0
    for i, fault in enumerate(survivable(op, len(survived))):
        seen = [rank[i] for rank in by_rank]
        expect_whole(seen)
        if fault.kind in CHECKED:
            for s in seen:
                expect_mismatch(op, s, checked)
            checked += 1
            continue
        if fault.kind == "fork":
            assert all(s.error is None for s in seen), story(seen)
            expect_refusals(op, seen[CULPRIT])
            continue
        victims = [s for rank, s in enumerate(seen) if rank != CULPRIT]
        waited = fault.kind != "raise"
        for s in victims:
            expect_timeout(op, s, DEADLINE if waited else 0.0)
        if waited:  # to the end by one of them at least; the others may have heard of it
            assert max(s.seconds for s in victims) >= DEADLINE, story(seen)
        own = seen[CULPRIT]
        assert own.error is not None, fault
        if waited:
            assert own.error["kind"] == "PeerTimeout" and own.error["op"] == op, own
        else:
            assert own.error["kind"] == "Injected", own
            words = f"{op}: rank {CULPRIT} of group '0' left a call half-way: Injected: injected (called at "
            assert own.again.startswith(words), own
    assert all(s.threads == 0 for rank in by_rank for s in rank), "threads that outlive their calls"


# Each op at one of the points, by turns between two and three ranks: each row starts ranks of its own.
INSIDE = [(op, ("after a push", "before the end")[i % 2], SIZES[i // 2 % 2]) for i, op in enumerate(OPS)]


@pytest.mark.parametrize(("op", "point", "size"), INSIDE)
def test_a_rank_that_is_killed_inside_a_call_is_named_at_once(op: str, point: str, size: int) -> None:
    fault = Fault("kill", CULPRIT, STRIKES_AT, point=point)
    seen = run_ranks(strike, size, op, fault, LONG, False, expect_dead=(CULPRIT,))
    assert seen[CULPRIT] is None
    for s in seen[:CULPRIT] + seen[CULPRIT + 1 :]:
        assert not s.wrong
        expect_timeout(op, s, 0.0)
        assert s.error["ended"] or s.error["blames"] == CULPRIT


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_is_killed_between_calls_is_named_at_once(size: int) -> None:
    """By every op in a group of its own."""
    by_rank = run_ranks(kills, size, CULPRIT, LONG, expect_dead=(CULPRIT,))
    for rank, of_ops in enumerate(by_rank):
        if rank != CULPRIT:
            for op, seen in zip(OPS, of_ops, strict=True):
                expect_timeout(op, seen, 0.0)
                assert seen.error["ended"] or seen.error["blames"] == CULPRIT


def litter() -> set[str]:
    return {str(p) for p in Path("/dev/shm").glob("*") if "weft" in p.name or "torch_" in p.name}


def alive(rank: int, world_size: int) -> bool:
    case = OPS["one_shot_all_reduce"](rank, world_size, 0, 1, None, 0)
    return bool((case.call() == case.want()).all())


def killed_in_a_row(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@pytest.mark.alone
def test_a_restarted_job_works_at_once() -> None:
    before = litter()
    for _ in range(2):
        run_ranks(killed_in_a_row, 3, expect_dead=(2,))
        begin = time.monotonic()
        assert run_ranks(alive, 3, fresh=True) == [True] * 3
        assert time.monotonic() - begin < 30
    assert litter() <= before
