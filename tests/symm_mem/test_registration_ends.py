"""The end of registrations: what is kept, what is never used again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from weft import symm_mem
from weft.symm_mem.registration.segments import UNUSED


def neighbours(rank: int, world_size: int) -> tuple[int, int]:
    return (rank + 1) % world_size, (rank - 1) % world_size


@on_ranks(3, fresh=True)
def test_memory_is_kept_until_all_ranks_have_dropped_it(rank: int, world_size: int) -> None:
    """A registration ends when all ranks have dropped it, and not before."""
    t = torch.randn(1000)
    (x,) = symm_mem.register([t])
    storage = torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage())
    right, left = neighbours(rank, world_size)
    if rank == 0:
        del x
        gc.collect()
    del t
    (y,) = symm_mem.register([torch.zeros(1)])
    assert symm_mem.stats().registered == 2 and not storage.expired()
    if rank:
        del x
        gc.collect()
    (z,) = symm_mem.register([torch.zeros(2)])
    assert symm_mem.stats().registered == 2 and storage.expired()
    y.signal(left)
    y.put(torch.ones(1), right)
    y.wait(left)
    assert z.number == 3


@on_ranks(2, fresh=True)
def test_nothing_is_done_behind_the_end(rank: int, world_size: int) -> None:
    (x,) = symm_mem.register([torch.zeros(2)])
    symm_mem.unregister([x])
    for call in (lambda: x.put(torch.ones(2), rank), lambda: x.wait(0), lambda: symm_mem.unregister([x])):
        with pytest.raises(symm_mem.WeftError, match="the registration of tensor 1 has ended"):
            call()
    assert symm_mem.stats().registered == 0


@on_ranks(2, fresh=True)
def test_a_slot_is_zero_for_its_next_tensor(rank: int, world_size: int) -> None:
    """A slot that another tensor had: its signals are not taken for this one's."""
    symm_mem.set_timeout(0.3)
    (x,) = symm_mem.register([torch.zeros(2)])
    for _ in range(3):
        x.signal((rank + 1) % world_size)
    slot = x.of.slot
    symm_mem.unregister([x])
    (y,) = symm_mem.register([torch.zeros(2)])
    assert y.of.slot == slot
    with pytest.raises(symm_mem.PeerTimeout, match="is 0, expected 1"):
        y.put(torch.ones(2), (rank + 1) % world_size)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    y.signal((rank - 1) % world_size)
    y.put(torch.ones(2), (rank + 1) % world_size)
    y.wait((rank - 1) % world_size)


@on_ranks(2)
def test_an_address_that_comes_back_is_other_memory(rank: int, world_size: int) -> None:
    """Shared memory that is freed, and other memory that comes to lie at its address."""
    right, left = neighbours(rank, world_size)
    seen, names = set(), set()
    for turn in range(12):
        t = torch.full((1 << 16,), float(turn)).share_memory_()
        seen.add(t.data_ptr())
        (x,) = symm_mem.register([t])
        names.add(x.of.keys[rank])
        x.signal(left)
        assert (x.get(torch.empty(1 << 16), right) == turn).all()
        x.wait(left)
        symm_mem.unregister([x])
        del x, t
    assert len(names) == 12
    assert len(seen) < 12, "no address came back: this shows nothing"


@on_ranks(2, fresh=True)
def test_segments_that_nobody_uses_are_evicted(rank: int, world_size: int) -> None:
    for turn in range(UNUSED + 30):
        (x,) = symm_mem.register([torch.zeros(4096).share_memory_()])
        if turn == 5:
            kept = x
        del x
    (last,) = symm_mem.register([torch.zeros(1)])
    stats = symm_mem.stats()
    assert stats.registered == 2 and kept.tensors[1 - rank] is not None
    assert UNUSED <= stats.segments <= UNUSED + 2 * world_size
    assert stats.reserved <= (UNUSED + 2) * 16384
    maps = Path("/proc/self/maps").read_text().count("/torch_")  # files of shared tensors
    assert maps <= UNUSED + 4, f"of {maps} those that nobody uses are unmapped"
    symm_mem.unregister([kept, last])


@on_ranks(2, fresh=True)
def test_a_group_that_is_destroyed_is_not_kept(rank: int, world_size: int) -> None:
    """Nothing keeps a group beyond its end, nor takes another one of its name for it."""
    for turn in range(2):
        pg = dist.new_group()
        tensor = torch.full((3,), float(turn))
        (x,) = symm_mem.register([tensor], pg)
        assert symm_mem.register([tensor], pg)[0] is x
        assert symm_mem.register([tensor], pg.group_name)[0] is x
        name, gone = pg.group_name, weakref.ref(pg)
        dist.destroy_process_group(pg)
        with pytest.raises(ValueError, match=name):
            symm_mem.register([tensor], name)
        del pg, x
        gc.collect()
        assert gone() is None
    (y,) = symm_mem.register([tensor])
    y.signal(rank)
    y.put(torch.ones(3), rank)
    y.wait(rank)
