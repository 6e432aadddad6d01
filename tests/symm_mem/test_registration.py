"""Ordinary tensors as peers, between CPU ranks: what is mapped or copied, what is found again, what ends when."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.registration.table import UNUSED

KINDS = ("private", "shared", "heap", "view")


def make(kind: str, *shape: int) -> torch.Tensor:
    if kind == "shared":
        return torch.randn(*shape).share_memory_()
    if kind == "heap":
        block = symm_mem.empty(20, 20)  # of one size on all ranks
        return block[3 : 3 + shape[0], 2 : 2 + shape[1]].copy_(torch.randn(*shape))
    if kind == "view":  # rows and columns of something larger, transposed
        wide = torch.randn(shape[-1] * 2 + 1, 3 + shape[0])
        return wide[1::2, 2 : 2 + shape[0]].t()
    return torch.randn(*shape)


def neighbours(rank: int, world_size: int) -> tuple[int, int]:
    return (rank + 1) % world_size, (rank - 1) % world_size


def gathered(x: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Each rank's, of any size."""
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, x.double())
    return found


def moves(rank: int, world_size: int, kind: str) -> None:
    right, left = neighbours(rank, world_size)
    for turn in range(3):
        mine = make(kind, 5 + rank, 7)
        (x,) = symm_mem.register([mine])
        assert [tuple(shape) for shape in x.shapes] == [(5 + r, 7) for r in range(world_size)]
        before = gathered(mine, world_size)
        x.signal(left)
        out = torch.full((5 + right, 7), float("nan"))
        assert x.get(out, right) is out
        assert torch.equal(out.double(), before[right])
        x.wait(left)
        sent = torch.randn(7, 5 + right).t()
        x.signal(left)
        x.put(sent, right)
        x.wait(left)
        assert torch.equal(mine.double(), gathered(sent, world_size)[left])
        if turn == 1:
            symm_mem.unregister([x])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_data_goes_both_ways(world_size: int, kind: str) -> None:
    run_ranks(moves, world_size, kind)


def mixed(rank: int, world_size: int) -> None:
    """Each rank's tensor lies in memory of another kind, and has another size."""
    right, left = neighbours(rank, world_size)
    tensors = {kind: make(kind, 4, 3 + rank) for kind in KINDS}
    x, y = symm_mem.register([tensors[KINDS[rank % len(KINDS)]], torch.arange(rank)])
    for _ in range(50):
        x.signal(left)
        x.put(torch.full((4, 3 + right), float(right)), right)
        x.wait(left)
        assert (x.tensor == rank).all()
        x.tensor.fill_(-1)
    y.signal(left)
    assert y.get(torch.full((right,), -1), right).tolist() == list(range(right))
    y.wait(left)
    symm_mem.unregister([x, y])


@pytest.mark.parametrize("world_size", [2, 4])
def test_kinds_and_sizes_that_differ_by_rank(world_size: int) -> None:
    run_ranks(mixed, world_size)


def mapped(rank: int, world_size: int) -> None:
    whole = torch.zeros(100).share_memory_()
    a, b = symm_mem.register([whole[:10], whole[50:].view(5, 10).t()])
    for x in (a, b):
        assert all(tensor is not None for tensor in x.tensors)
        assert x.tensors[rank] is x.tensor
    stats = symm_mem.stats()
    assert (stats.registered, stats.segments) == (2, world_size)
    assert stats.reserved == 400 * (world_size - 1)
    right, left = neighbours(rank, world_size)
    b.signal(left)
    b.put(torch.full((10, 5), rank + 1.0), right)
    b.wait(left)
    assert (whole[50:] == left + 1).all() and (whole[:50] == 0).all()
    (c,) = symm_mem.register([torch.zeros(3)])
    assert [tensor is None for tensor in c.tensors] == [r != rank for r in range(world_size)]
    assert symm_mem.stats().reserved == stats.reserved, "copies take no addresses"
    view = b.tensors[right]
    symm_mem.unregister([a, b, c])
    assert view is not None and view.sum() == 50 * (rank + 1), "a tensor keeps what it lies in"


def test_a_segment_is_mapped_once() -> None:
    run_ranks(mapped, 3, fresh=True)


def found_again(rank: int, world_size: int) -> None:
    t = torch.randn(6, 6)
    (x,) = symm_mem.register([t])
    steps = get_heap().rendezvous._step
    assert symm_mem.register([t])[0] is x
    assert symm_mem.register((t[:, :],))[0] is x, "another object, the same memory"
    assert get_heap().rendezvous._step == steps, "no exchange"
    y, z, again = symm_mem.register([t, t.t(), t.t()])
    assert y is x and z is not x and again is z
    assert symm_mem.stats().registered == 2
    symm_mem.unregister([x])
    assert symm_mem.register([t])[0] is not x


def test_what_is_registered_is_found_again() -> None:
    run_ranks(found_again, 2, fresh=True)


def otherwise(rank: int, world_size: int) -> None:
    """Rank 1 knows the tensor, the others do not."""
    symm_mem.set_timeout(20)
    t, other = torch.randn(4), torch.randn(4)
    (x,) = symm_mem.register([t])
    if rank == 1:
        assert symm_mem.register([t])[0] is x
    else:
        with pytest.raises(symm_mem.RankMismatch) as caught:
            symm_mem.register([other])
        assert caught.value.rank == 1
        assert "tensors [1]" in str(caught.value) and "tensors [new]" in str(caught.value)
    (z,) = symm_mem.register([torch.zeros(2)])
    z.signal((rank - 1) % world_size)
    z.put(torch.ones(2), (rank + 1) % world_size)
    z.wait((rank - 1) % world_size)


def test_a_hit_where_others_miss_is_named() -> None:
    run_ranks(otherwise, 3, fresh=True)


def checked(rank: int, world_size: int) -> None:
    a, b = symm_mem.register([torch.zeros(1), torch.ones(1)])
    symm_mem.set_checked(True)
    with pytest.raises(
        symm_mem.RankMismatch, match=r"rank 1 asked for tensors \[2\], rank 0 for tensors \[1\]"
    ):
        symm_mem.register([(a, b)[rank].tensor])
    symm_mem.set_checked(False)


def test_hits_are_compared_in_the_checked_mode() -> None:
    run_ranks(checked, 2, fresh=True)


def unlike(rank: int, world_size: int) -> None:
    with pytest.raises(symm_mem.RankMismatch, match="dtypes"):
        symm_mem.register([torch.zeros(2, dtype=torch.float16 if rank == 1 else torch.float32)])
    with pytest.raises(symm_mem.RankMismatch, match=r"\[new, new\]"):
        symm_mem.register([torch.zeros(2) for _ in range(1 + (rank == 1))])
    (x, y) = symm_mem.register([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(symm_mem.RankMismatch, match="unregister"):
        symm_mem.unregister([x if rank else y])
    x.signal(rank)
    x.put(torch.ones(2), rank)
    x.wait(rank)
    assert symm_mem.stats().registered == 2


def test_ranks_that_register_or_end_other_things() -> None:
    run_ranks(unlike, 2, fresh=True)


def dropped(rank: int, world_size: int) -> None:
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


def test_memory_is_kept_until_all_ranks_have_dropped_it() -> None:
    run_ranks(dropped, 3, fresh=True)


def ended(rank: int, world_size: int) -> None:
    (x,) = symm_mem.register([torch.zeros(2)])
    symm_mem.unregister([x])
    for call in (lambda: x.put(torch.ones(2), rank), lambda: x.wait(0), lambda: symm_mem.unregister([x])):
        with pytest.raises(symm_mem.WeftError, match="the registration of tensor 1 has ended"):
            call()
    assert symm_mem.stats().registered == 0


def test_nothing_is_done_behind_the_end() -> None:
    run_ranks(ended, 2, fresh=True)


def counts_begin_anew(rank: int, world_size: int) -> None:
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


def test_a_slot_is_zero_for_its_next_tensor() -> None:
    run_ranks(counts_begin_anew, 2, fresh=True)


def reused(rank: int, world_size: int) -> None:
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


def test_an_address_that_comes_back_is_other_memory() -> None:
    run_ranks(reused, 2)


def bounded(rank: int, world_size: int) -> None:
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
    maps = Path("/proc/self/maps").read_text().count("torch_")
    assert maps <= UNUSED + 4, "those that nobody uses are unmapped"
    symm_mem.unregister([kept, last])


def test_segments_that_nobody_uses_are_evicted() -> None:
    run_ranks(bounded, 2, fresh=True)


def many(rank: int, world_size: int) -> None:
    """More registrations than one slab of semaphores has room for."""
    xs = symm_mem.register([torch.zeros(1) for _ in range(600)])
    right, left = neighbours(rank, world_size)
    for x in (xs[0], xs[255], xs[256], xs[599]):
        x.signal(left)
        x.put(torch.full((1,), float(x.number)), right)
        x.wait(left)
        assert x.tensor.item() == x.number
    slots = {x.of.slot for x in xs}
    assert slots == set(range(600))
    symm_mem.unregister(xs)
    assert symm_mem.stats().registered == 0


def test_more_than_a_slab() -> None:
    run_ranks(many, 2, fresh=True)


def refused(rank: int, world_size: int) -> None:
    for bad, kind, words in [
        (torch.zeros(2), TypeError, "tensors: is of type Tensor"),
        ([], ValueError, "tensors: is empty"),
        ([3], TypeError, r"tensors\[0\]: is of type int"),
        ([torch.zeros(2), torch.zeros(1).expand(4)], ValueError, r"tensors\[1\]: has strides \(0,\)"),
        ([torch.zeros(2, dtype=torch.complex64).conj()], ValueError, "conjugated"),
        ([torch.eye(2).to_sparse()], ValueError, "must be strided"),
        ([torch.zeros(2, device="meta")], ValueError, "is on meta"),
    ]:
        with pytest.raises(kind, match=words):
            symm_mem.register(bad)  # type: ignore[arg-type]
    (x,) = symm_mem.register([torch.zeros(2, 3)])
    right = (rank + 1) % world_size
    for source, words in [
        (torch.zeros(3, 2), r"source: is torch.float32\[3, 2\]"),
        (torch.zeros(2, 3, dtype=torch.float64), "source: is torch.float64"),
    ]:
        with pytest.raises(ValueError, match=words):
            x.put(source, right)
    with pytest.raises(ValueError, match="out: has strides"):
        x.get(torch.zeros(1, 1).expand(2, 3), right)
    with pytest.raises(ValueError, match="peer: is 2, must be a rank from 0 to 1"):
        x.signal(2)
    with pytest.raises(TypeError, match="source: is of type list"):
        x.put([1], right)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="registered: has a Tensor"):
        symm_mem.unregister([torch.zeros(1)])  # type: ignore[list-item]
    x.signal(rank)
    x.put(torch.ones(2, 3, requires_grad=True), rank)
    x.wait(rank)


def test_what_is_refused() -> None:
    run_ranks(refused, 2)


def without_descriptor(rank: int, world_size: int) -> None:
    """Shared memory that this process cannot hand on is copied from."""
    right, left = neighbours(rank, world_size)
    memory = mmap.mmap(-1, 4096)  # shared, and of no file that has a name
    x_tensor = torch.frombuffer(memory, dtype=torch.float32)
    (x,) = symm_mem.register([x_tensor])
    x.signal(left)
    x.put(torch.full((1024,), rank + 1.0), right)
    x.wait(left)
    assert (x_tensor == left + 1).all()
    symm_mem.unregister([x])


def test_shared_memory_without_a_descriptor() -> None:
    run_ranks(without_descriptor, 2)


def destroyed(rank: int, world_size: int) -> None:
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


def test_a_group_that_is_destroyed_is_not_kept() -> None:
    run_ranks(destroyed, 2, fresh=True)


def far_ahead(rank: int, world_size: int) -> None:
    """Rank 1 finds its tensor more often than its page has room for, where rank 0 has one that is new."""
    symm_mem.set_timeout(20)
    t, other = torch.randn(4), torch.randn(4)
    (x,) = symm_mem.register([t])
    if rank == 1:
        for _ in range(200):
            assert symm_mem.register([t])[0] is x
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(
        symm_mem.RankMismatch, match=r"rank 1 asked for tensors that it knew, in 192 calls since"
    ):
        symm_mem.register([other])


def test_a_rank_that_is_far_ahead_is_named() -> None:
    run_ranks(far_ahead, 2, fresh=True)


def of_some(rank: int, world_size: int) -> None:
    """Two groups that overlap, each with registrations of its own of one tensor."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    mine = torch.full((2, 2), float(rank))
    for members, group in zip(([0, 2], [1, 2]), groups, strict=True):
        if rank not in members:
            continue
        (x,) = symm_mem.register([mine], group)
        assert (x.rank, x.world_size, x.number) == (members.index(rank), 2, 1)
        x.signal(1 - x.rank)
        assert (x.get(torch.empty(2, 2), 1 - x.rank) == members[1 - x.rank]).all()
        x.wait(1 - x.rank)


def test_groups_that_overlap() -> None:
    run_ranks(of_some, 3)


def in_training(rank: int, world_size: int) -> None:
    """Parameters and results of autograd: what is moved is outside of it."""
    right, left = neighbours(rank, world_size)
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    (x,) = symm_mem.register([weight])
    loss = (weight * torch.ones(3, requires_grad=True)).exp()
    x.signal(left)
    x.put(loss, right)
    x.wait(left)
    assert torch.allclose(weight.detach(), torch.full((3,), float(left)).exp())
    with torch.inference_mode():
        x.signal(left)
        out = x.get(torch.empty(3), right)
        x.wait(left)
    assert torch.allclose(out, torch.full((3,), float(rank)).exp()) and weight.requires_grad


def test_parameters_and_modes() -> None:
    run_ranks(in_training, 2)
