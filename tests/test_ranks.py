"""Rows of a table on ranks that stay: after a row that failed, hung or died the next one finds ranks that are right."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from once import made_once
from opcommon import world
from ranks import run_ranks, run_row
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


def environment(rank: int, world_size: int, name: str) -> tuple[str | None, str | None]:
    return os.environ.get(name), os.environ.get("PYTHONPATH")


def test_variables_are_those_of_the_ranks_that_asked_for_them() -> None:
    """Of ranks that were forked from a server that had imported torch before."""
    path = os.environ.get("PYTHONPATH")
    assert run_ranks(environment, 2, "WEFT_OF_A_TEST", env={"WEFT_OF_A_TEST": "7"}) == [("7", path)] * 2
    assert run_ranks(environment, 2, "WEFT_OF_A_TEST") == [(None, path)] * 2
    assert "WEFT_OF_A_TEST" not in os.environ


def test_a_file_is_made_once_for_all_who_ask_at_the_same_time() -> None:
    made: list[str] = []

    def make(place: Path) -> None:
        time.sleep(0.1)  # the others come meanwhile
        place.write_text("whole")
        made.append(threading.current_thread().name)

    def ask(what: str) -> None:
        assert made_once(("a test", what), make).read_text() == "whole"

    threads = [threading.Thread(target=ask, args=(what,)) for what in ("one", "other") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 2


def test_what_could_not_be_made_is_made_by_the_next() -> None:
    def fail(place: Path) -> None:
        place.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(["a file that fails"], fail)
    assert made_once(["a file that fails"], lambda place: place.write_text("whole")).read_text() == "whole"
