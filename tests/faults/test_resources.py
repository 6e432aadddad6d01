"""What a machine can run out of: a clear error on every rank, and the heap as before."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, one_shot_all_reduce
from weft.symm_mem.backends.host import HostBackend
from weft.symm_mem.bootstrap import fd_exchange
from weft.symm_mem.failure import rank_pages
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap

SHORT = 1  # the rank that runs out
MORE = 40 << 20  # bytes: the heap must grow for so many
CALL_CHECK = "map the call check"  # the last step of making what checked calls are compared on


@contextmanager
def limit(which: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@contextmanager
def no_descriptors(but: int) -> Iterator[None]:
    """So many files can still be opened."""
    with ExitStack() as stack:
        top = max(map(int, os.listdir("/proc/self/fd"))) + 8
        stack.enter_context(limit(resource.RLIMIT_NOFILE, top))
        taken: list[int] = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for fd in taken[len(taken) - but :]:
            os.close(fd)
        try:
            yield
        finally:
            for fd in taken[: len(taken) - but]:
                os.close(fd)


def state() -> tuple[int, ...]:
    gc.collect()
    heap = get_heap()
    with open("/proc/self/maps") as f:
        mapped = sum("memfd:weft" in line for line in f)
    return heap.capacity, mapped, len(os.listdir("/proc/self/fd"))


def works(rank: int, world_size: int) -> None:
    x = torch.full((1000,), float(rank))
    assert (one_shot_all_reduce(x, "sum", None) == sum(range(world_size))).all()
    peers = symm_mem.rendezvous(symm_mem.empty(100))
    peers.tensors[rank].fill_(rank)
    peers.barrier()
    assert [int(t[99]) for t in peers.tensors] == list(range(world_size))
    peers.barrier()


def runs_out(rank: int, world_size: int, what: str, left: int) -> str:
    works(rank, world_size)
    symm_mem.empty(1)  # whatever has been dropped so far is reported
    before = state()
    with ExitStack() as stack:
        if rank == SHORT and what == "files":
            stack.enter_context(no_descriptors(left))
        elif rank == SHORT:
            stack.enter_context(limit(resource.RLIMIT_FSIZE, left))
        with pytest.raises(symm_mem.WeftError) as error:
            symm_mem.empty(MORE, dtype=torch.uint8)
    assert state() == before
    works(rank, world_size)
    symm_mem.rendezvous(symm_mem.empty(MORE, dtype=torch.uint8)).barrier()
    return f"{type(error.value).__name__}: {error.value}"


# With none left there is no memory file, with one no socket, with two no connection, with three no peer's descriptor.
@pytest.mark.parametrize(
    ("what", "left", "words"),
    [("memory", 1 << 20, "no shared memory for [0-9]+ bytes: File too large")]
    + [("files", left, "Too many open files") for left in range(4)],
)
def test_a_rank_that_runs_out_is_named_on_every_rank(what: str, left: int, words: str) -> None:
    texts = run_ranks(runs_out, 3, what, left, fresh=True, store="tcp", timeout=60)
    assert len(set(texts)) == 1, texts
    text = texts[0]
    assert text.startswith("WeftError: ") and " in group '0': " in text, text
    assert re.search(rf"rank {SHORT}: OSError: (\[Errno \d+\] )?{words}", text), text


def no_addresses(rank: int, world_size: int) -> str:
    x = torch.full((10,), float(rank))
    with open("/proc/self/statm") as f:
        mapped = int(f.read().split()[0]) * resource.getpagesize()
    with ExitStack() as stack:
        if rank == SHORT:
            stack.enter_context(limit(resource.RLIMIT_AS, mapped + (8 << 30)))
        with pytest.raises(symm_mem.WeftError) as error:
            one_shot_all_reduce(x, "sum", None)
    with open("/proc/self/statm") as f:
        assert int(f.read().split()[0]) * resource.getpagesize() < mapped + (1 << 30), (
            "a reservation was left"
        )
    works(rank, world_size)
    return str(error.value)


def test_a_range_that_cannot_be_reserved() -> None:
    texts = run_ranks(no_addresses, 2, fresh=True)
    assert texts[0] == texts[1]
    assert f"reserve addresses in group '0': rank {SHORT}: OSError" in texts[0]
    assert "cannot reserve" in texts[0] and "Cannot allocate memory" in texts[0]


def no_files_at_first(rank: int, world_size: int) -> str:
    """A rank cannot even say who it is when the heap is made: none until a reset, after which they try again."""
    with ExitStack() as stack:
        if rank == SHORT:
            problem = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            stack.enter_context(mock.patch.object(HostBackend, "identity", side_effect=problem))
        with pytest.raises(symm_mem.HeapUnavailable) as error:
            symm_mem.empty(4)
    with pytest.raises(symm_mem.HeapUnavailable):
        symm_mem.empty(4)
    symm_mem.reset()
    works(rank, world_size)
    return str(error.value)


def test_a_group_that_could_not_make_a_heap_tries_again_behind_a_reset() -> None:
    texts = run_ranks(no_files_at_first, 2, fresh=True)
    assert texts[0] == texts[1] and f"rank {SHORT}: OSError: [Errno 24] Too many open files" in texts[0]


@on_ranks(3, fresh=True, store="tcp")
def test_an_interrupt_between_two_descriptors(rank: int, world_size: int) -> None:
    """Ctrl-C when one of the peers' descriptors has come already: it is closed, and so is the own one."""
    symm_mem.set_timeout(20)
    works(rank, world_size)
    before, taken = state(), 0
    take = fd_exchange._take

    def interrupts(*args: Any) -> int:
        nonlocal taken
        taken += 1
        if taken == world_size - 1:
            raise KeyboardInterrupt
        return take(*args)

    with ExitStack() as stack:
        if rank == SHORT:
            stack.enter_context(mock.patch.object(fd_exchange, "_take", interrupts))
        with pytest.raises(KeyboardInterrupt if rank == SHORT else symm_mem.PeerTimeout):
            symm_mem.empty(MORE, dtype=torch.uint8)
    symm_mem.reset()
    assert state() == before
    works(rank, world_size)


def closes_and_is_interrupted(offer: fd_exchange.Offer, real: Any = fd_exchange.Offer.close) -> None:
    real(offer)
    raise KeyboardInterrupt


# Steps in which a rank comes by new memory.
TAKEN_AT = {
    "posix_fallocate": (os, mock.Mock(side_effect=KeyboardInterrupt)),
    "close": (fd_exchange.Offer, closes_and_is_interrupted),
    "_enter_chunk": (Heap, mock.Mock(side_effect=KeyboardInterrupt)),
}


@pytest.mark.parametrize("step", TAKEN_AT)
@on_ranks(2, fresh=True)
def test_an_interrupt_leaves_no_memory_behind(rank: int, world_size: int, step: str) -> None:
    """Ctrl-C while the system looks for memory, when the peers' has come, or when it is mapped and nobody knows it."""
    symm_mem.set_timeout(20)
    works(rank, world_size)
    before = state()
    owner, instead = TAKEN_AT[step]
    with ExitStack() as stack:
        if rank == SHORT:
            stack.enter_context(mock.patch.object(owner, step, instead))
        with pytest.raises(KeyboardInterrupt if rank == SHORT else symm_mem.PeerTimeout):
            symm_mem.empty(MORE, dtype=torch.uint8)
        if rank == SHORT:
            assert state() == before
    symm_mem.reset()
    assert state() == before
    works(rank, world_size)


@on_ranks(2, fresh=True, env={"WEFT_CHECK": "0"})
def test_a_call_check_that_one_rank_cannot_make_leaves_no_file_open(rank: int, world_size: int) -> None:
    works(rank, world_size)
    symm_mem.empty(1)
    before = state()
    symm_mem.set_checked(True)
    with ExitStack() as stack:
        if rank == SHORT:
            stack.enter_context(
                mock.patch.object(rank_pages, "shared_memory", side_effect=OSError("no page"))
            )
        for _ in range(3):
            with pytest.raises(
                symm_mem.WeftError, match=f"make the call check .* rank {SHORT}: OSError: no page"
            ):
                one_shot_all_reduce(torch.ones(3), "sum", None)
    assert state() == before
    works(rank, world_size)


def out_of_memory_inside(rank: int, world_size: int) -> str:
    """An allocation of torch fails in the middle of a call: this rank gets that error, the others its name."""
    symm_mem.set_timeout(20)
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    fused_all_gather_matmul(a, [b], 0, None)

    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 17 bytes")

    with ExitStack() as stack:
        if rank == SHORT:
            stack.enter_context(mock.patch.object(torch, "empty", empty))
        with pytest.raises(RuntimeError) as error:  # noqa: PT012  (the others may come one call further)
            for _ in range(3):
                fused_all_gather_matmul(a, [b], 0, None)
    with pytest.raises(symm_mem.WeftError) as again:
        fused_all_gather_matmul(a, [b], 0, None)
    symm_mem.reset()
    assert (fused_all_gather_matmul(a, [b], 0, None)[1][0] == 4).all()
    return f"{error.value} | {again.value}"


def test_an_exception_inside_a_call() -> None:
    other, short = run_ranks(out_of_memory_inside, 2, fresh=True)
    assert short.startswith(
        "not enough memory: you tried to allocate 17 bytes | fused_all_gather_matmul: rank 1 "
    )
    assert "left a call half-way: RuntimeError: not enough memory" in short
    assert "waited 0" in other and "for rank 1: " in other and "it has given up (called at " in other


@pytest.mark.parametrize("last_step", ["finish an allocation", CALL_CHECK])
@on_ranks(2, fresh=True)
def test_what_one_rank_alone_has_made(rank: int, world_size: int, last_step: str) -> None:
    """A rank gives up in the last step of making a workspace or a call check, when the other one has it already."""
    symm_mem.set_timeout(1)
    a, b = torch.full((4, 4), rank + 1.0), torch.ones(4, 4)
    symm_mem.empty(1)  # what is made once for the group is there
    rendezvous = get_heap().rendezvous
    gather = rendezvous.gather
    symm_mem.set_checked(last_step == CALL_CHECK)

    def gives_up(what: str, *args: Any, **named: Any) -> object:
        posts = gather(what, *args, **named)
        if what == last_step:
            raise KeyboardInterrupt
        return posts

    if rank == SHORT:
        with mock.patch.object(rendezvous, "gather", gives_up), pytest.raises(KeyboardInterrupt):
            fused_all_gather_matmul(a, [b], 0, None)
    else:
        with pytest.raises(symm_mem.WeftError):
            fused_all_gather_matmul(a, [b], 0, None)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    for _ in range(3):
        (product,) = fused_all_gather_matmul(a, [b], 0, None)[1]
        assert product[:4].eq(4).all() and product[4:].eq(8).all()
