"""Ranks that register: what is found again, and who has found otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap


@on_ranks(2, fresh=True)
def test_what_is_registered_is_found_again(rank: int, world_size: int) -> None:
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


@on_ranks(3, fresh=True)
def test_a_hit_where_others_miss_is_named(rank: int, world_size: int) -> None:
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


@on_ranks(2, fresh=True)
def test_hits_are_compared_in_the_checked_mode(rank: int, world_size: int) -> None:
    a, b = symm_mem.register([torch.zeros(1), torch.ones(1)])
    symm_mem.set_checked(True)
    with pytest.raises(
        symm_mem.RankMismatch, match=r"rank 1 asked for tensors \[2\], rank 0 for tensors \[1\]"
    ):
        symm_mem.register([(a, b)[rank].tensor])
    symm_mem.set_checked(False)


@on_ranks(2, fresh=True)
def test_ranks_that_register_or_end_other_things(rank: int, world_size: int) -> None:
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


@on_ranks(2, fresh=True)
def test_a_rank_that_is_far_ahead_is_named(rank: int, world_size: int) -> None:
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


@on_ranks(3)
def test_groups_that_overlap(rank: int, world_size: int) -> None:
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
