"""Memory goes to the group's own processes: to no other process of the user, and to no other user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.symm_mem.bootstrap import fd_exchange
from weft.symm_mem.heap.registry import get_heap

STRANGER = Path(__file__).with_name("stranger.py")


def grow_beside_a_stranger(rank: int, world_size: int, arguments: list[str]) -> tuple[int, int] | None:
    stranger = None
    if rank == 0:
        command = [sys.executable, str(STRANGER), "3", *arguments]
        stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    kept = []  # so that each turn grows the heap
    for _ in range(60):
        kept.append(symm_mem.empty(9 << 20, dtype=torch.uint8))
        symm_mem.rendezvous(kept[-1]).barrier()
        ended = [None] * world_size
        torch.distributed.all_gather_object(ended, stranger is not None and stranger.poll() is not None)
        if any(ended):
            break
    if stranger is None:
        return None
    asked, given = stranger.communicate(timeout=20)[0].split()
    return int(asked), int(given)


@pytest.mark.parametrize(
    "user",
    [
        [],
        pytest.param(
            ["65534"], marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
        ),
    ],
)
def test_a_process_outside_the_group_gets_no_memory_and_holds_nobody_up(user: list[str]) -> None:
    asked, given = run_ranks(grow_beside_a_stranger, 2, user, fresh=True)[0]
    assert asked > 0, "the stranger found no socket to ask"
    assert given == 0


def held(fd: int) -> int:
    """How many descriptors this process has of that file; what other tests have left closes meanwhile."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.samestat(os.fstat(int(name)), os.fstat(fd))
    return found


def is_bound(name: str) -> bool:
    bound = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    return "@" + name.lstrip("\0") in bound


def test_an_offer_is_for_those_who_know_the_secret_and_ends() -> None:
    fd = os.memfd_create("offered")
    offer = fd_exchange.Offer([fd], "secret", lasting=True)
    with pytest.raises(symm_mem.WeftError, match=r"^rank 0 refused its descriptor"):
        fd_exchange.take("rank 0", offer.name, "Secret", 10.0)
    (taken,) = fd_exchange.take("rank 0", offer.name, "secret", 10.0)
    assert os.path.samestat(os.fstat(fd), os.fstat(taken))
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):  # a description of its own
        fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
    until = time.monotonic() + 10
    while held(fd) > 3 and time.monotonic() < until:
        time.sleep(0.01)  # the giver closes the one that it has sent
    assert (held(fd), is_bound(offer.name)) == (3, True)
    offer.close()
    offer.close()
    assert (held(fd), is_bound(offer.name)) == (2, False)
    with pytest.raises(
        symm_mem.WeftError, match=r"^rank 0 did not hand over its descriptor: Connection refused"
    ):
        fd_exchange.take("rank 0", offer.name, "secret", 10.0)
    for each in (fd, taken):
        os.close(each)


@pytest.mark.parametrize("lasting", [False, True])
def test_an_offer_outlasts_the_programs_default_timeout(lasting: bool) -> None:
    fd, before = os.memfd_create("offered"), socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.05)
    try:
        offer = fd_exchange.Offer([fd], "secret", lasting=lasting)
        time.sleep(0.3)
        taken = fd_exchange.take("rank 0", offer.name, "secret", 10.0)
        offer.close()
    finally:
        socket.setdefaulttimeout(before)
    assert not offer.problems and os.path.samestat(os.fstat(fd), os.fstat(taken[0]))
    for each in (fd, *taken):
        os.close(each)


def test_an_offer_between_ranks_ends_where_nothing_wakes_it() -> None:
    """As where the kernel shuts down no socket that is not connected."""
    fd = os.memfd_create("offered")
    offer = fd_exchange.Offer([fd], "secret")
    with mock.patch.object(socket.socket, "shutdown", side_effect=OSError):
        closing = threading.Thread(target=offer.close, daemon=True)
        closing.start()
        closing.join(10)
    assert not closing.is_alive() and not is_bound(offer.name)
    os.close(fd)


class Trap:
    """Unpickling this leaves a trace."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.putenv, ("WEFT_TRAPPED", "1")


@on_ranks(2, fresh=True)
def test_a_forged_post_is_not_unpickled(rank: int, world_size: int) -> None:
    """What comes from the store or a socket is data, whoever wrote it."""
    heap = get_heap()
    symm_mem.rendezvous(symm_mem.empty(4)).barrier()
    meeting = heap.rendezvous
    if rank == 0:
        meeting._store.get("forge").set(meeting._key(meeting._step, 1), pickle.dumps(Trap()))
    torch.distributed.barrier()
    if rank == 0:
        with pytest.raises(ValueError, match=r"codec|Expecting|utf"):
            meeting.gather("allocate", None)
        with pytest.raises(symm_mem.CallAbandoned, match="rank 0 of group '0' left a call half-way"):
            symm_mem.empty(4)
    torch.distributed.barrier()
    symm_mem.reset()
    symm_mem.rendezvous(symm_mem.empty(4)).barrier()


def test_nothing_received_is_interpreted() -> None:
    folder = Path(fd_exchange.__file__).parent
    for file in folder.rglob("*.py"):
        source = file.read_text()
        assert not any(
            word in source for word in ("pickle.", "import pickle", "eval(", "exec(", "marshal")
        ), file
