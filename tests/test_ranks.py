"""Rows of a table on ranks that stay: after a row that failed, hung or died the next one finds ranks that are right."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time

import pytest
import torch
from opcommon import world
from ranks import on_ranks, run_ranks, run_row
from weft import symm_mem
from weft.fused_ops import one_shot_all_reduce


def healthy(rank: int, world_size: int) -> int:
    """The process, in which an op is right with the timeout of the beginning."""
    assert symm_mem.get_timeout() > 1 and not symm_mem.is_checked()
    assert one_shot_all_reduce(torch.full((3,), 1.0 + rank), "sum", world()).tolist() == [3.0] * 3
    return os.getpid()


def wrong(rank: int, world_size: int) -> None:
    raise AssertionError(f"rank {rank} is wrong")


def broken(rank: int, world_size: int) -> None:
    """Rank 1 does not come, and what rank 0 has set stays set."""
    symm_mem.set_timeout(0.2)
    symm_mem.set_checked(True)
    if rank == 0:
        one_shot_all_reduce(torch.ones(3), "sum", world())
    raise AssertionError("rank 1 has not come")


def dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(1)


def hangs(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)
    raise AssertionError("rank 1 hangs")


def test_ranks_stay() -> None:
    assert run_row(healthy, 2) == run_row(healthy, 2)


@pytest.mark.parametrize(
    ("fails", "words"),
    [(wrong, "rank 0 is wrong"), (broken, "waited 0.2 s for rank 1")],
    ids=["wrong", "broken"],
)
def test_ranks_that_answer_are_reset(fails: object, words: str) -> None:
    before = run_row(healthy, 2)
    with pytest.raises(AssertionError, match=words):
        run_row(fails, 2)  # type: ignore[arg-type]
    assert run_row(healthy, 2) == before


@pytest.mark.parametrize(
    ("fails", "words"), [(dies, "died without a word"), (hangs, "did not finish")], ids=["dies", "hangs"]
)
def test_others_are_started_anew(fails: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.AFTER_A_FAILURE", 0.5)
    before = run_row(healthy, 2)
    with pytest.raises(AssertionError, match=words):
        run_row(fails, 2)  # type: ignore[arg-type]
    assert not set(run_row(healthy, 2)) & set(before)


@on_ranks([1, 2])
def last_says(rank: int, world_size: int, words: str) -> None:
    assert rank == 0, words


def test_a_test_on_ranks_fails_where_a_rank_does() -> None:
    last_says(world_size=1, words="rank 1 is right")
    with pytest.raises(AssertionError, match="rank 1 is wrong"):
        last_says(world_size=2, words="rank 1 is wrong")
    assert list(inspect.signature(last_says).parameters) == ["world_size", "words"]
    assert [mark.args for mark in last_says.pytestmark] == [("world_size", [1, 2])]  # type: ignore[attr-defined]


def found(rank: int, world_size: int) -> tuple[bool, str, int, float]:
    paths = os.environ.get("PYTHONPATH", "")
    return "compiled_before" in sys.modules, paths, threading.active_count(), symm_mem.get_timeout()


def test_ranks_are_forked_from_a_process_that_has_compiled() -> None:
    paths = os.environ.get("PYTHONPATH", "")
    assert run_ranks(found, 2, env={"WEFT_TIMEOUT": "7"}, fresh=True) == [(True, paths, 1, 7.0)] * 2
