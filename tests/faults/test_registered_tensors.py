"""Faults between registered tensors of CPU ranks: who is late, dead, interrupted or forked, and forged posts."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked import in_child, refusal
from ranks import on_ranks
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.registration import cross_process, registry
from weft.symm_mem.registration.segments import read_place, read_segment

DEADLINE = 1.0


def ring(rank: int, world_size: int, x: symm_mem.RegisteredTensor) -> None:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for turn in range(3):
        x.signal(left)
        x.put(torch.full(x.shapes[right], 10.0 * turn + rank), right)
        x.wait(left)
        assert (x.tensor == 10 * turn + left).all()


@pytest.mark.parametrize("op", ["put", "batch_put", "get", "wait", "batch_wait"])
@on_ranks([2, 3], fresh=True)
def test_a_peer_that_does_not_come_is_named(rank: int, world_size: int, op: str) -> None:
    symm_mem.set_timeout(DEADLINE)
    (x,) = symm_mem.register([torch.zeros(3, 2)])
    ring(rank, world_size, x)
    if rank == 0:
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: x.put(torch.zeros(3, 2), 1),
            "batch_put": lambda: symm_mem.batch_put([(x, torch.zeros(3, 2), 0), (x, torch.zeros(3, 2), 1)]),
            "get": lambda: x.get(torch.zeros(3, 2), 1),
            "wait": lambda: x.wait(1),
            "batch_wait": lambda: symm_mem.batch_wait([(x, 0), (x, 1)]),
        }
        x.signal(0)  # of a batch what can be done is done
        if op == "batch_wait":
            x.put(torch.zeros(3, 2), 0)
        begin = time.monotonic()
        with pytest.raises(symm_mem.PeerTimeout) as caught:
            calls[op]()
        said = caught.value
        assert DEADLINE <= time.monotonic() - begin < DEADLINE + 2
        waits = op.endswith("wait")
        owner = 0 if waits else 1
        # Of two ranks each is the left one of the other, of three rank 1 has not accessed rank 0's tensor.
        expected = 1 if waits and world_size == 3 else 4
        assert (said.op, said.peer, said.expected, said.seen) == (op, 1, expected, expected - 1)
        assert f"registered tensor 1, float32[3, 2] on rank {owner}, is {expected - 1}" in str(said)
        assert Path(__file__).name in str(said)
        with pytest.raises(symm_mem.PeerTimeout):
            x.signal(1)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    ring(rank, world_size, x)


@pytest.mark.parametrize("kind", ["shared", "private"])
@on_ranks(2, expect_dead=(1,))
def test_a_rank_that_dies_while_others_use_its_memory(rank: int, world_size: int, kind: str) -> None:
    """Rank 1 is killed while the others have mapped its memory, or copy from it."""
    symm_mem.set_timeout(120)
    mine = torch.full((1000,), float(rank))
    (x,) = symm_mem.register([mine.share_memory_() if kind == "shared" else mine])
    ring(rank, world_size, x)
    for peer in range(world_size):
        x.signal(peer)
        x.signal(peer)
    x.get(torch.zeros(1000), 1)
    if rank == 1:
        symm_mem.rendezvous(symm_mem.empty(1)).barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    symm_mem.rendezvous(symm_mem.empty(1)).barrier()
    time.sleep(0.5)
    begin = time.monotonic()
    if kind == "shared":  # what it let others read is still there
        x.get(torch.zeros(1000), 1)
    else:
        with pytest.raises(symm_mem.PeerTimeout, match=r"get: rank 0 .* rank 1.*its process has ended"):
            x.get(torch.zeros(1000), 1)
    with pytest.raises(symm_mem.PeerTimeout, match=r"rank 1.*its process has ended"):
        symm_mem.batch_put([(x, torch.zeros(1000), 0), (x, torch.zeros(1000), 1)])
    with pytest.raises(symm_mem.PeerTimeout, match="process has ended"):
        symm_mem.unregister([x])
    assert time.monotonic() - begin < 30, "nobody waits for the dead until the deadline"


@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_register(rank: int, world_size: int) -> None:
    symm_mem.set_timeout(DEADLINE)
    (x,) = symm_mem.register([torch.zeros(2)])
    if rank:
        with pytest.raises(symm_mem.PeerTimeout, match=r"register: .* rank 0: its count of .* is 1"):
            symm_mem.register([torch.zeros(3)])
    else:
        time.sleep(2 * DEADLINE)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    if rank:
        time.sleep(0.2)
    (y,) = symm_mem.register([torch.zeros(2)])
    ring(rank, world_size, x)
    ring(rank, world_size, y)


STEPS = {
    "describe": (registry.OwnSegments, "describe"),
    "map": (registry.Registry, "_map"),
    "zero": (registry.Semaphores, "zero"),
    "use": (registry.SegmentTable, "use"),
    "release": (registry.Registry, "_release"),
}


@pytest.mark.parametrize("step", STEPS)
@on_ranks(3, fresh=True)
def test_an_interrupt_in_each_step(rank: int, world_size: int, step: str) -> None:
    """Ctrl-C on one rank in each step: the others hear of it, and after a reset all have the same registrations."""
    symm_mem.set_timeout(20)
    (x, gone) = symm_mem.register([torch.zeros(2), torch.zeros(5)])
    before = len(os.listdir("/proc/self/fd"))
    owner, name = STEPS[step]
    del gone
    with ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(owner, name, side_effect=KeyboardInterrupt))
        if rank == 1:
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        else:  # who has completed its last step hears of it later
            stack.enter_context(suppress(symm_mem.WeftError))
        made = symm_mem.register([torch.zeros(4).share_memory_() for _ in range(3)])
        del made
    symm_mem.reset()
    (y,) = symm_mem.register([torch.zeros(2)])
    ring(rank, world_size, x)
    ring(rank, world_size, y)
    (z,) = symm_mem.register([torch.zeros(2)])
    assert symm_mem.stats().registered == 3
    gc.collect()  # the traceback keeps the tensors, which have descriptors
    assert len(os.listdir("/proc/self/fd")) <= before
    numbers = (symm_mem.stats(), y.number, z.number, z.of.slot, sorted(get_heap().registrations.entries))
    found: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(found, numbers)
    assert all(each == found[0] for each in found), found


@on_ranks(2, fresh=True)
def test_copies_that_the_machine_forbids_are_refused_by_name(rank: int, world_size: int) -> None:
    """A machine that does not let one process copy from another."""
    with ExitStack() as stack:
        if rank == 1:

            def refuses(*args: Any, **named: Any) -> None:
                raise PermissionError(errno.EPERM, "Operation not permitted")

            stack.enter_context(mock.patch.object(cross_process, "_copy", refuses))
        with pytest.raises(
            symm_mem.WeftError,
            match=r"reach the memory of all ranks .* rank 1: OSError: the memory of rank 0's process cannot be copied"
            " here: Operation not permitted",
        ):
            symm_mem.register([torch.zeros(2)])
    assert symm_mem.stats().registered == 0
    (x,) = symm_mem.register([torch.zeros(2).share_memory_()])
    ring(rank, world_size, x)


@on_ranks(2, fresh=True)
def test_a_forked_child_is_refused(rank: int, world_size: int) -> None:
    (x,) = symm_mem.register([torch.zeros(2)])

    def tried() -> list[Any]:
        calls = (lambda: x.signal(0), lambda: symm_mem.register([x.tensor]), lambda: symm_mem.unregister([x]))
        found = [refusal(call) for call in calls]
        return [each and each["kind"] for each in found]

    assert in_child(tried, "exit") == ["ForkedProcess"] * 3
    ring(rank, world_size, x)


@on_ranks(2, fresh=True)
def test_a_put_that_is_left_half_way(rank: int, world_size: int) -> None:
    """Ctrl-C while a put copies: the group is broken, for the other rank, too, until a reset."""
    symm_mem.set_timeout(20)
    (x,) = symm_mem.register([torch.zeros(2)])
    x.signal(1 - rank)
    if rank == 0:
        with (
            mock.patch.object(cross_process, "_copy", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            x.put(torch.ones(2), 1)
        with pytest.raises(symm_mem.CallAbandoned, match=r"put: rank 0 .* KeyboardInterrupt"):
            x.signal(1)
    else:
        begin = time.monotonic()
        with pytest.raises(symm_mem.PeerTimeout, match="has given up"):
            x.wait(0)
        assert time.monotonic() - begin < 10
    symm_mem.reset()
    ring(rank, world_size, x)


@pytest.mark.parametrize(
    "post",
    [
        ["process", "0", 0, 10],
        ["process", "0", -1, 10, "", []],
        ["process", "0", 0, 1 << 63, "", []],
        ["process", "0", 0, 1.5, "", []],
        ["elsewhere", "0", 0, 10, "", []],
        ["file", "0", 0, 10, "", [4, 5]],
        ["ipc", "0", 0, 10, "no hex", []],
        None,
    ],
)
def test_a_forged_segment_is_refused(post: Any) -> None:
    with pytest.raises(symm_mem.WeftError, match=r"rank 3 has posted .*, which is no segment"):
        read_segment(3, post)


@pytest.mark.parametrize(
    "post",
    [
        [0, 0, [5], [1], "float32"],
        [0, 1, [4], [1], "float32"],
        [0, 0, [2, 2], [3, 1], "float32"],
        [0, 0, [1], [1], "zeros"],
        [0, -4, [1], [1], "float32"],
        [0, 0, [-1], [1], "float32"],
        [0, 0, [2], [1, 1], "float32"],
        [1, 0, [1], [1], "float32"],
        [-1, 0, [1], [1], "float32"],
    ],
)
def test_a_tensor_outside_of_its_segment_is_refused(post: Any) -> None:
    segments = [read_segment(3, ["process", "0", 4096, 16, "", []])]
    assert read_place(3, [0, 0, [2, 2], [2, 1], "float32"], segments).bytes == 16
    with pytest.raises(symm_mem.WeftError, match=r"rank 3 has posted .*, which is no tensor of its segments"):
        read_place(3, post, segments)
