"""Every op, every fault: an error with a name on every rank, in time, no wrong number, and the group comes back."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from faults.cases import OPS, STEPS, STRIKES_AT, Seen, expect_whole, kills, strike, strikes
from faults.inject import Fault
from ranks import run_ranks

DEADLINE = 0.4
SLOW = 2.5  # seconds: this many CPU ranks share a few cores with whatever else runs

# Another number of ranks for each op: between them all are covered.
SIZES = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 3, "one_shot_all_reduce": 4}
CULPRIT = 1

SURVIVABLE = [
    Fault("delay", CULPRIT, STRIKES_AT, seconds=3 * DEADLINE),
    Fault("delay", CULPRIT, STRIKES_AT, seconds=3 * DEADLINE, point="before the end"),
    Fault("stop", CULPRIT, STRIKES_AT, seconds=3 * DEADLINE),
    Fault("skip", CULPRIT, STRIKES_AT),
    Fault("corrupt", CULPRIT, STRIKES_AT),
    Fault("raise", CULPRIT, STRIKES_AT, point="after a push"),
    Fault("raise", CULPRIT, STRIKES_AT, point="before the end"),
]


def expect_timeout(op: str, seen: Seen, deadline: float) -> None:
    """A PeerTimeout that says everything, within the deadline."""
    error = seen.error
    assert error is not None and error["kind"] == "PeerTimeout", seen
    assert error["op"] == op, error
    assert re.search(r"faults/cases\.py:\d+$", error["site"]), error
    words = (
        rf"{op}: rank \d of group '\w+' waited [\d.]+ s for rank \d: "
        r"(flag \d+|'done') of rank \d \(half [01]\) is \d+, expected \d+"
        r"(, and its process has ended|, and it has given up( on rank \d)?)? \(called at .*faults/cases\.py:\d+\)"
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
    assert error["text"].count(f"{op}(") == 2 and len(re.findall(r"cases\.py:\d+", error["text"])) == 2, error
    assert seen.seconds < SLOW


@pytest.mark.parametrize("op", OPS)
def test_faults_that_a_group_survives(op: str) -> None:
    size = SIZES[op]
    by_rank: list[list[Seen]] = run_ranks(strikes, size, op, SURVIVABLE, DEADLINE, fresh=True)
    checked = 0
    for i, fault in enumerate(SURVIVABLE):
        seen = [rank[i] for rank in by_rank]
        expect_whole(seen)
        if fault.kind in ("skip", "corrupt"):
            for s in seen:
                expect_mismatch(op, s, checked)
            checked += 1
            continue
        victims = [s for rank, s in enumerate(seen) if rank != CULPRIT]
        for s in victims:
            expect_timeout(op, s, DEADLINE)
        own = seen[CULPRIT].error
        assert own is not None, fault
        if fault.kind == "raise":
            assert (
                own["kind"] == "Injected"
                and "left a call half-way: Injected: injected" in seen[CULPRIT].again
            )
        else:
            assert own["kind"] == "PeerTimeout", own
    assert all(s.threads == 0 for rank in by_rank for s in rank), "threads that outlive their calls"


@pytest.mark.parametrize("point", ["before the call", "after a push", "before the end"])
@pytest.mark.parametrize("op", OPS)
def test_a_killed_rank_is_named_at_once(op: str, point: str) -> None:
    size = SIZES[op]
    fault = Fault("kill", CULPRIT, STRIKES_AT, point=point)
    # The deadline is long: nobody waits for it once the process has ended.
    seen = run_ranks(strike, size, op, fault, 60.0, False, expect_dead=(CULPRIT,))
    for rank, s in enumerate(seen):
        if rank != CULPRIT:
            assert not s.wrong
            expect_timeout(op, s, 0.0)
            assert s.error["ended"] or s.error["blames"] == CULPRIT


def test_a_killed_rank_is_named_by_every_op_in_a_group_of_its_own() -> None:
    by_rank = run_ranks(kills, 3, CULPRIT, 60.0, expect_dead=(CULPRIT,))
    for rank, of_ops in enumerate(by_rank):
        if rank != CULPRIT:
            for op, seen in zip(OPS, of_ops, strict=True):
                expect_timeout(op, seen, 0.0)


def litter() -> set[str]:
    return {str(p) for p in Path("/dev/shm").glob("*") if "weft" in p.name or "torch_" in p.name}


def alive(rank: int, world_size: int) -> bool:
    case = OPS["one_shot_all_reduce"](rank, world_size, 0, 1, None, 0)
    return bool((case.call() == case.want()).all())


def killed_in_a_row(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_a_restarted_job_works_at_once() -> None:
    before = litter()
    for _ in range(2):
        run_ranks(killed_in_a_row, 3, expect_dead=(2,))
        begin = time.monotonic()
        assert run_ranks(alive, 3, fresh=True) == [True] * 3
        assert time.monotonic() - begin < 30
    assert litter() <= before
