"""Signals, and the protocol of a workspace, on real CPU processes."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

import pytest
import torch
from opcommon import DEVICES
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.symm_mem.failure.spin_wait import PeerLiveness, reached, spin
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import NUM_BUFFERS, Layout
from weft.symm_mem.workspace import HostEpoch, Workspace


@on_ranks([2, 3], device=DEVICES)
def test_data_is_there_when_its_signal_is(rank: int, world_size: int) -> None:
    x = symm_mem.empty(64, dtype=torch.int64)
    peers = symm_mem.rendezvous(x)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for turn in range(200):
        peers.tensors[right].fill_(turn * 10 + rank)
        peers.put(right, 3)
        peers.wait(left, 3)
        assert (x == turn * 10 + left).all()
        peers.put(left, 4)  # read: the left one may write again
        peers.wait(right, 4)


@on_ranks(2, fresh=True)
def test_puts_are_counted(rank: int, world_size: int) -> None:
    peers = symm_mem.rendezvous(symm_mem.empty(1))
    if rank == 0:
        for _ in range(5):
            peers.put(1, 2)
        peers.put(1, 5)
    else:
        peers.wait(0, 5)
        for _ in range(5):
            peers.wait(0, 2)
        symm_mem.set_timeout(0.5)
        with pytest.raises(symm_mem.PeerTimeout, match=r"wait: rank 1 .* for rank 0: channel 2 is 5"):
            peers.wait(0, 2)


@on_ranks(3)
def test_nobody_leaves_a_barrier_early(rank: int, world_size: int) -> None:
    arrived = symm_mem.empty(1, dtype=torch.int64).zero_()
    peers = symm_mem.rendezvous(arrived)
    peers.barrier(3)
    for turn in range(1, 3 * world_size):
        if turn % world_size == rank:
            time.sleep(0.05)
        arrived.fill_(turn)
        peers.barrier(1)
        there = [int(x) for x in peers.tensors]
        assert min(there) >= turn, f"left the barrier of turn {turn} when the ranks were at {there}"
        peers.barrier(2)


def test_a_long_wait_leaves_the_core_to_others() -> None:
    word = ctypes.c_uint32(0)
    used = time.thread_time()
    assert spin(ctypes.addressof(word), 1, 1.0, PeerLiveness(None, None)) is not None
    assert time.thread_time() - used < 0.25, "of the second that the wait took"


def test_counters_wrap_around() -> None:
    assert reached(5, 5) and reached(6, 5) and not reached(4, 5)
    assert reached(2, 0xFFFFFFFE) and not reached(0xFFFFFFFE, 2)


@pytest.mark.parametrize(("world_size", "flags"), [(1, 1), (2, 64), (3, 7), (8, 1000)])
def test_the_parts_of_a_workspace_do_not_overlap(world_size: int, flags: int) -> None:
    layout = Layout(world_size, flags, 1000)
    taken: dict[int, str] = {}
    for buffer in range(NUM_BUFFERS):
        words = {
            layout.EPOCH + buffer: "epoch",
            layout.EPOCH_TICKET + buffer: "ticket",
            layout.LEFT + buffer: "left",
        }
        words |= {layout.done(buffer) + r: f"done {buffer} {r}" for r in range(world_size)}
        words |= {layout.flags(buffer) + i: f"flag {buffer} {i}" for i in range(world_size * flags)}
        assert not taken.keys() & words.keys()
        taken |= words
    assert max(taken) < layout.words
    assert layout.buffer(0) >= layout.words * 4 and layout.buffer(1) >= layout.buffer(0) + 1000
    assert layout.bytes >= layout.buffer(1) + 1000
    assert layout.describe(layout.flags(1) + flags) == (
        "flag 0 of rank 1 (buffer 1)" if world_size > 1 else layout.describe(layout.flags(1) + flags)
    )


def test_ll_data_belongs_to_its_buffer() -> None:
    layout = Layout(2, 0, 1024, ll_protocol=True)
    for buffer in range(NUM_BUFFERS):
        for byte in (0, 1020):
            word = (layout.buffer(buffer) + byte) // 4
            assert layout.counter_of(word) == buffer
            assert layout.describe(word) == f"epoch of the data at byte {byte} (buffer {buffer})"
    assert replace(layout, ll_protocol=False).counter_of(layout.buffer(0) // 4) is None
    assert layout.counter_of(Layout.EPOCH) is None


def test_a_workspace_for_both_has_room_for_both() -> None:
    small, large = Layout(2, 64, 512, staging_bytes=4096), Layout(2, 128, 1024)
    for joined in (small.joined(large), large.joined(small)):
        assert joined == Layout(2, 128, 1024, staging_bytes=4096)
        assert joined.holds(small) and joined.holds(large)
    assert not small.holds(large) and not large.holds(small)


@on_ranks(3)
def test_halves_are_never_overwritten_before_they_are_read(rank: int, world_size: int) -> None:
    ws = Workspace(get_heap(), Layout(world_size, 2, world_size * 400), "test")
    ws.words[Layout.EPOCH] = -3  # 32-bit counters shortly before they wrap around: buffer 0 only
    ws.words[ws.layout.done(0) : ws.layout.done(0) + world_size] = -3
    # (Its flags are those of 2**32 - 3 uses ago: calls in between had less to say.)
    symm_mem.rendezvous(symm_mem.empty(1)).barrier()
    for turn in range(12):
        use = HostEpoch(ws, "test")
        mine = torch.full((100,), 100 * turn + rank, dtype=torch.int32)
        for peer in range(world_size):
            if peer != rank:
                use.wait_free(peer)
                ws.buffer(peer, use.buffer, (world_size, 100), torch.int32)[rank] = mine
                use.post(peer, 1)
        if turn % world_size == rank:
            time.sleep(0.02)
        for peer in range(world_size):
            if peer != rank:
                use.wait(peer, 1)
                assert (
                    ws.buffer(rank, use.buffer, (world_size, 100), torch.int32)[peer] == 100 * turn + peer
                ).all()
        use.leave()


@on_ranks(3, fresh=True)
def test_a_rank_that_only_receives_may_be_late(rank: int, world_size: int) -> None:
    """Where each rank sends to all, what comes from a peer says that it has left the use before last. Not here."""
    symm_mem.set_timeout(20)
    ws = Workspace(get_heap(), Layout(world_size, 1, 400), "one way")
    symm_mem.rendezvous(symm_mem.empty(1)).barrier()
    for turn in range(8):
        with HostEpoch(ws, "test") as use:
            if rank == 0:
                for peer in range(1, world_size):
                    use.wait_free(peer)
                    ws.buffer(peer, use.buffer, (100,), torch.int32).fill_(turn)
                    use.post(peer, 0)
                continue
            if turn in (rank - 1, 4):
                time.sleep(0.1)
            use.wait(0, 0)
            got = ws.buffer(rank, use.buffer, (100,), torch.int32)
            assert (got == turn).all()
            if turn == 2:
                time.sleep(0.1)
                assert (got == turn).all(), "overwritten before this rank has left"


def breaks(rank: int, world_size: int) -> str | None:
    symm_mem.set_timeout(0.5)
    ws = Workspace(get_heap(), Layout(world_size, 1, 64), "test")
    if rank == 1:
        return None
    use = HostEpoch(ws, "an_op")
    with pytest.raises(symm_mem.PeerTimeout) as error:
        use.wait(1, 0)
    with pytest.raises(symm_mem.PeerTimeout) as again:
        HostEpoch(ws, "an_op")
    assert str(again.value) == str(error.value)
    return str(error.value)


def test_a_broken_workspace_takes_no_more_calls() -> None:
    text = run_ranks(breaks, 2, fresh=True)[0]
    assert (
        text.startswith("an_op: rank 0 of group")
        and "for rank 1: flag 0 of rank 1 (buffer 1) is 0, expected 1" in text
    )
