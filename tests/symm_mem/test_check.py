"""What breaks a group on one rank, and how ``check`` says it; records are written here by hand, as kernels do."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.kernels.device.comm import ll_exchange
from weft.symm_mem.failure.call_log import TimedName
from weft.symm_mem.failure.fault import Fault, fault_of
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import HostEpoch, Workspace

WAIT_DATA, WAIT_FREE, ABORTED = 1, 2, 3


def with_record(heap: Heap, tag: str, layout: Any = None) -> Workspace[Any]:
    """A workspace as on GPUs, where kernels note what their waits run into."""
    fault = fault_of(heap)
    if fault._record is None:
        fault._record = torch.zeros(8, dtype=torch.int64)
        fault.written = ctypes.c_int64.from_address(fault._record.data_ptr())
    return Workspace(heap, layout or Layout(heap.world_size, 4, 1024), tag)


def note(space: Workspace[Any], *record: int) -> None:
    space.fault._record.copy_(torch.tensor([1, space.address, *record]))


@on_ranks(2, fresh=True)
def test_the_first_error_is_raised_and_a_group_can_be_asked_alone(rank: int, world_size: int) -> None:
    heap = get_heap()
    other = dist.new_group([0, 1])
    first, second, elsewhere = spaces = [
        with_record(heap, "first"),
        with_record(heap, "second"),
        with_record(get_heap(other), "third"),
    ]
    for n, space in enumerate(spaces):
        space.raise_if_broken(f"op {n}" if n < 2 else TimedName("op 2", 0.25))
        space.next_buffer()
    symm_mem.check()
    if rank == 1:
        layout = first.layout
        note(second, 0, layout.done(1), 1, 2, ABORTED, 2000)
        note(elsewhere, 0, layout.done(1), 0, 5, WAIT_FREE, 1000)
        of_other = r"^op 2: rank 1 .* waited 0.25 s for rank 0: 'done' of rank 0 \(buffer 1\)"
        with pytest.raises(symm_mem.PeerTimeout, match=of_other):
            symm_mem.check()
        words = (
            rf"^op 1: rank 1 of group '0' waited 0 s for rank 0: abort notice of rank 0 is 2, expected 0, "
            rf"and it has given up on rank 1 \(called at {__file__}"
        )
        for group in (dist.group.WORLD, "0"):
            with pytest.raises(symm_mem.PeerTimeout, match=words) as error:
                symm_mem.check(group)
            assert error.value.culprit == 1 and not error.value.ended
        for space in (first, second):  # whichever it was that has waited
            with pytest.raises(symm_mem.PeerTimeout, match=words):
                space.raise_if_broken("another op")
        with pytest.raises(symm_mem.PeerTimeout, match=of_other):
            symm_mem.check(other)
    symm_mem.reset(other)
    symm_mem.check(other)
    elsewhere.raise_if_broken("op")
    symm_mem.reset()
    symm_mem.check()
    first.raise_if_broken("op")
    if rank == 0:  # a workspace that is gone, whose last kernels were still running
        flag = second.layout.flags(1)
        fault, address = second.fault, second.address
        del second, spaces, space
        gc.collect()
        fault._record.copy_(torch.tensor([1, address, 1, flag, 1, 0, WAIT_DATA, 3000]))
        gone = r"^op 1: rank 0 .* for rank 1: flag 0 of rank 0 \(buffer 1\) is 0, expected 1"
        with pytest.raises(symm_mem.PeerTimeout, match=gone):
            symm_mem.check()


@on_ranks(2, fresh=True)
def test_who_waits_until_slots_are_empty_is_the_call_that_needs_them(rank: int, world_size: int) -> None:
    heap, peer = get_heap(), 1 - rank
    for expected, kind, op in ((1, WAIT_DATA, 0), (1, WAIT_FREE, 1), (3, WAIT_FREE, 1), (5, WAIT_DATA, 2)):
        layout = ll_exchange.ExchangeLayout(world_size, 64)
        space = with_record(heap, "pushes", layout)
        for n, uses in enumerate((1, 3, 1)):
            space.raise_if_broken(f"op {n}", grids=(2,) * uses)
        note(space, peer, layout.emptied + world_size + peer, expected, expected - 1, kind, 1000)
        emptied = rf"^op {op}: .* last epoch that rank {peer} has emptied for block 1 is {expected - 1}, exp"
        with pytest.raises(symm_mem.PeerTimeout, match=emptied):
            symm_mem.check()
        symm_mem.reset()


def breaks_one(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 0 waits in vain for rank 1 in one workspace; rank 2 waits for rank 0 in another one."""
    heap, other = get_heap(), dist.new_group(list(range(world_size)))
    spaces = [Workspace(heap, Layout(world_size, 1, 64), f"workspace {i}") for i in range(2)]
    beside = Workspace(get_heap(other), Layout(world_size, 1, 64), "of another group")
    signals = symm_mem.rendezvous(symm_mem.empty(1))
    symm_mem.set_timeout(0.5 if rank == 0 else 30)
    begin, text = time.monotonic(), ""
    if rank != 1:
        space, peer = (spaces[0], 1) if rank == 0 else (spaces[1], 0)
        with pytest.raises(symm_mem.PeerTimeout) as error, HostEpoch(space, f"op of {rank}") as use:
            use.wait(peer, 0)
        text = str(error.value)
    seconds = time.monotonic() - begin
    if rank == 0:  # the same words whatever it does with this group, and nothing is sent
        for call in (
            lambda: HostEpoch(spaces[1], "another op"),
            lambda: signals.put(1),
            lambda: signals.wait(1),
            symm_mem.check,
        ):
            with pytest.raises(symm_mem.PeerTimeout) as again:
                call()
            assert str(again.value) == text
        assert not heap.tensor(1, spaces[1].block.offset, (spaces[1].layout.words,), torch.int32, None).any()
    with HostEpoch(beside, "beside") as use:  # another group of the same ranks
        for peer in range(world_size):
            if peer != rank:
                use.post(peer, 0)
                use.wait(peer, 0)
    symm_mem.set_timeout(30)
    symm_mem.reset()
    symm_mem.check()
    assert not spaces[0].fault.words.any()
    for space in spaces:
        with HostEpoch(space, "after") as use:
            for peer in range(world_size):
                if peer != rank:
                    use.post(peer, 0)
                    use.wait(peer, 0)
    signals.barrier()
    return text, seconds


def test_what_breaks_one_workspace_breaks_all_of_the_group() -> None:
    (first, _), _, (third, seconds) = run_ranks(breaks_one, 3, fresh=True)
    assert first.startswith("op of 0: rank 0 of group '0' waited 0.5 s for rank 1: flag 0 of rank 1"), first
    assert third.startswith("op of 2: rank 2 of group '0' waited") and seconds < 10, (third, seconds)
    assert "for rank 0: flag 0 of rank 0" in third and "it has given up on rank 1" in third, third


@on_ranks(2, fresh=True)
def test_who_waits_elsewhere_hears_of_it(rank: int, world_size: int) -> None:
    """A thread in one workspace does not wait on when another has failed in another one, nor do the other ranks."""
    signals = symm_mem.rendezvous(symm_mem.empty(1))
    spaces = [Workspace(get_heap(), Layout(world_size, 1, 64), f"workspace {i}") for i in range(2)]
    symm_mem.set_timeout(30)
    if rank == 0:
        seen: list[str] = []

        def wait() -> None:
            try:
                with HostEpoch(spaces[0], "op") as use:
                    use.wait(1, 0)
            except symm_mem.WeftError as e:
                seen.append(str(e))

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(KeyError), HostEpoch(spaces[1], "op"):
            raise KeyError("a reason")
        thread.join(20)
        assert len(seen) == 1 and "left a call half-way: KeyError: 'a reason'" in seen[0], seen
        assert int(spaces[0].fault.words[Fault.ABORT_NOTICE]) == 1 + 0
    else:
        with pytest.raises(symm_mem.PeerTimeout, match=r"^wait: .* for rank 0: .*, and it has given up"):
            signals.wait(0)
    symm_mem.reset()


@on_ranks(2, fresh=True)
def test_a_group_that_is_destroyed_is_over(rank: int, world_size: int) -> None:
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    for g in (group, other):
        fault_of(get_heap(g))
    fault_of(get_heap(group)).breaks(symm_mem.WeftError("what came of a group that is gone"))
    with pytest.raises(symm_mem.WeftError, match="gone"):
        symm_mem.check()
    dist.barrier()
    dist.destroy_process_group(group)
    symm_mem.check()
    symm_mem.check(other)
