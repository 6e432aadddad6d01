"""Ctrl-C between two steps that the ranks take together: the others are told at once, and a reset mends all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from weft import symm_mem
from weft.fused_ops import one_shot_all_reduce
from weft.symm_mem.backends.host import HostBackend
from weft.symm_mem.bootstrap.store import StoreQuestions
from weft.symm_mem.failure import call_check, fault, rank_pages
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

LONG = 60.0  # seconds: a deadline that no test waits for
SHORT = 1  # the rank that is interrupted


@contextmanager
def ctrl_c(where: Any, step: str) -> Iterator[None]:
    """A KeyboardInterrupt instead of the next ``step``, once."""
    real, pressed = getattr(where, step), []

    def presses(*args: Any, **named: Any) -> Any:
        if pressed:
            return real(*args, **named)
        pressed.append(step)
        raise KeyboardInterrupt

    with mock.patch.object(where, step, presses), pytest.raises(KeyboardInterrupt):
        yield


def reduces() -> None:
    total = one_shot_all_reduce(torch.full((50,), dist.get_rank() + 1.0), "sum", None)
    assert (total == sum(range(1, dist.get_world_size() + 1))).all()


def checked() -> None:
    symm_mem.set_checked(True)
    try:
        reduces()
    finally:
        symm_mem.set_checked(False)


def makes_a_heap() -> None:
    symm_mem.empty(4)


def prepares() -> None:
    get_heap().prepare("an_op", "key", lambda: None)


def grows() -> None:
    """Without a word that is zero at first, which would be one more step."""
    get_heap().allocate(40 << 20, "a block")


# What is called, whether the group has memory before, and where it is interrupted.
CASES: dict[str, tuple[Callable[[], None], bool, Any, str]] = {
    "make a heap": (makes_a_heap, False, HostBackend, "reserve"),
    "make the call check": (checked, True, rank_pages, "shared_memory"),
    "exchange the call checks": (checked, True, rank_pages, "exchange"),
    "compare calls": (checked, True, fault, "spin"),
    "prepare": (prepares, True, StoreQuestions, "__enter__"),
    "grow": (grows, True, Heap, "_enter_chunk"),
    "reset": (symm_mem.reset, True, Heap, "_quiesce"),
    "the end of a reset": (symm_mem.reset, True, HostBackend, "zero"),
}


def interrupted(rank: int, world_size: int, name: str) -> None:
    call, before, where, step = CASES[name]
    symm_mem.set_timeout(LONG)
    if before:
        makes_a_heap()
        with mock.patch.object(call_check, "_first_calls", False):  # a call check is made later
            reduces()
    dist.barrier()
    begin = time.monotonic()
    with ExitStack() as stack:
        if rank == SHORT:
            stack.enter_context(ctrl_c(where, step))
        else:
            stack.enter_context(pytest.raises(symm_mem.PeerTimeout, match="and it has given up"))
        call()
    assert time.monotonic() - begin < LONG / 4, "the others were not told"
    dist.barrier()
    # What is half-made is used by nobody.
    refused = [makes_a_heap] if before and step != "spin" else []
    refused += [reduces] if call is symm_mem.reset or step == "spin" else []
    begin = time.monotonic()
    for again in refused:
        with pytest.raises(symm_mem.WeftError):
            again()
    assert time.monotonic() - begin < LONG / 4, "it was tried"
    dist.barrier()
    symm_mem.reset()
    for right in (reduces, checked, makes_a_heap, prepares, grows):
        right()


@pytest.mark.parametrize("name", CASES)
def test_the_others_are_told_and_a_reset_mends_it(name: str) -> None:
    run_ranks(interrupted, 2, name, fresh=True)


def keeps_a_lock(rank: int, world_size: int) -> None:
    """Ctrl-C may come to a reset, or to a call, just before it lets go of a workspace."""
    symm_mem.set_timeout(2)
    made = Workspace(get_heap(), Layout(world_size, 4, 1024), "site")
    if rank == SHORT:
        made.lock.acquire()
    symm_mem.reset()
    reduces()


def test_a_lock_that_was_never_let_go_of_does_not_stop_its_thread() -> None:
    run_ranks(keeps_a_lock, 2, fresh=True)


def resets_twice(rank: int, world_size: int) -> None:
    """Two threads run into the same error, and both reset the group."""
    symm_mem.set_timeout(LONG)
    reduces()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            symm_mem.reset()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(2)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert time.monotonic() - begin < LONG / 4
    reduces()


def test_two_threads_of_each_rank_that_reset_one_group() -> None:
    run_ranks(resets_twice, 2, fresh=True)
