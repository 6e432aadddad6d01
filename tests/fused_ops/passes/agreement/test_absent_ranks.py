"""A rank that goes on in eager mode is waited for once, not by each graph that the others compile meanwhile."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_board import ask_all, make, post, stores
from test_ranks_that_differ import compiler, gather, world
from torch import Tensor
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement import guard
from weft.fused_ops.passes.agreement.votes import board_file
from weft.fused_ops.passes.agreement.votes.board import ABSENCE
from weft.fused_ops.passes.agreement.votes.vote_rows import ABSENT, ENDED, LATE, Answer
from weft.symm_mem.backends.host import host_identity

__all__ = ["stores"]  # the fixture
LONG = 2.5 * ABSENCE


def test_a_rank_that_was_waited_for_in_vain_is_not_waited_for_long_again() -> None:
    where = make(3)
    answers = ask_all(where[:2], [post(4)] * 2, LONG)
    assert answers == [Answer(False, LATE, 2)] * 2
    begin = time.monotonic()
    for begun in (6, 8):
        assert ask_all(where[:2], [post(begun)] * 2, 60.0) == [Answer(False, ABSENT, 2)] * 2
    assert time.monotonic() - begin < 30
    # Once it votes, at whichever graph, the others wait for it as before.
    assert not where[2].ask(post(8), 60.0).fused
    assert [b.absent() for b in where[:2]] == [None] * 2
    assert [a.fused for a in ask_all(where, [post(10)] * 3)] == [True] * 3


def test_a_rank_that_comes_while_it_is_waited_for_briefly_has_the_others_wait_on() -> None:
    where = make(3)
    assert where[0].ask(post(4), 0.05) == Answer(False, LATE, 1)
    assert where[0].absent() == 1
    where[1].ask(post(4), 0.0)
    begin = time.monotonic()
    assert where[0].ask(post(6), LONG).why == LATE
    assert time.monotonic() - begin >= LONG


def program(x: Tensor, w: Tensor) -> Tensor:
    return gather(x, world()) @ w


def at_its_limit(rank: int, size: int) -> tuple[Report, list[float]]:
    waited = []
    limit = 1 if rank == 1 else 8
    with compiler(), torch.no_grad(), torch._dynamo.config.patch(recompile_limit=limit):
        fusion = FusionPass(fuse="always")
        mine = torch.compile(program, options=fusion.options, dynamic=False)
        guard.VOTE_DEADLINE = 20.0
        w = torch.randn(8, 5)
        for rows in (8, 12, 16, 20, 8):
            if rows == 12:
                guard.VOTE_DEADLINE = 8 * ABSENCE
            x = torch.randn(rows, 8)
            before = fusion.report().questions.seconds
            torch.testing.assert_close(mine(x, w), program(x, w), rtol=1e-4, atol=1e-4)
            waited.append(fusion.report().questions.seconds - before)
            dist.barrier()
        return fusion.report(), waited


@pytest.mark.timeout(200)
def test_a_rank_at_its_recompile_limit_is_waited_for_once() -> None:
    (report, waited), (eager, _) = run_ranks(at_its_limit, 2)
    assert waited[1] >= 8 * ABSENCE > 4 * ABSENCE > max(waited[2:4]), waited
    absent = "rank 1 runs without graphs of this pass since it was waited for in vain"
    assert [(d.reason, d.runs) for d in report.disagreements] == [
        ("rank 1 did not come within 8 s", 1),
        (absent, 2),
    ]
    # And where it has a graph, both run it fused.
    assert (report.questions.fused, eager.questions.fused, eager.questions.count) == (2, 2, 2)


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    where = make(3)
    where[2]._file.close()  # as the kernel does when the process ends
    begin = time.monotonic()
    assert ask_all(where[:2], [post(4)] * 2, 60.0) == [Answer(False, ENDED, 2)] * 2
    assert time.monotonic() - begin < 30


def without_the_other(rank: int, size: int, ends: int) -> tuple[list[str], float]:
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    with compiler(), torch.no_grad():
        fusion = FusionPass(fuse="always")
        mine = torch.compile(program, options=fusion.options)
        mine(x, w)
        if rank == ends:
            os._exit(0)
        waited = fusion.report().questions.seconds
        with pytest.raises(RuntimeError):  # the backend's, in the fallback graph
            mine(x, w)
        report = fusion.report()
        return [d.reason for d in report.disagreements], report.questions.seconds - waited


def test_a_rank_that_dies_between_two_runs() -> None:
    (reasons, waited), _ = run_ranks(without_the_other, 2, 1, expect_dead=(1,))
    assert reasons == ["the process of rank 1 has ended"]
    assert waited < 10


def out_of_sight(rank: int, size: int) -> list[str]:
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    with compiler(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                board_file, "host_identity", lambda: {**host_identity(), "boot": "another", "host": "there"}
            )
        fusion = FusionPass(fuse="always")
        mine = torch.compile(program, options=fusion.options)
        torch.testing.assert_close(mine(x, w), program(x, w), rtol=1e-4, atol=1e-4)
        return [d.reason for d in fusion.report().disagreements]


def test_a_rank_that_cannot_open_the_board_is_named_with_the_cause() -> None:
    cause = r"rank \d cannot open the ranks' board: the group spans hosts: rank 0 runs on .*, rank 1 on there"
    for (reason,) in run_ranks(out_of_sight, 2, fresh=True):
        assert re.fullmatch(cause, reason)
