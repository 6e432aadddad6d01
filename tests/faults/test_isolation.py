"""Groups, threads and jobs do not get into each other's way."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.ops import OPS
from ranks import on_ranks
from weft import symm_mem
from weft.kernels.device.kernel_choice import make_together
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

KEPT: Any = SimpleNamespace(is_gone=lambda: False)  # a captured graph


@on_ranks(3, fresh=True, store="tcp")
def test_threads_with_groups_of_their_own_in_any_order(rank: int, world_size: int) -> None:
    """Two threads with a group each make and grow their memory; each rank lets another thread go first."""
    symm_mem.set_timeout(60)
    groups = [dist.new_group([0, 1]), dist.new_group([1, 0, 2]), dist.new_group([1, 2])]
    mine = [g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER]
    failures: list[BaseException] = []

    def work(nth: int, group: Any) -> None:
        try:
            symm_mem.set_timeout(60, group)
            for turn in range(3):
                time.sleep(0.1 * ((rank + nth) % 2))
                for op in OPS.values():  # each turn's calls are larger: the workspace grows
                    case = op(group.rank(), group.size(), turn, 1, group, 40 * turn)
                    assert torch.equal(case.call(), case.want())
                symm_mem.rendezvous(symm_mem.empty(3 << 20, dtype=torch.uint8, group=group)).barrier()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n, g)) for n, g in enumerate(mine)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


@on_ranks(3, fresh=True)
def test_an_overlapping_group_goes_on_beside_a_broken_one(rank: int, world_size: int) -> None:
    """A fault in one group: others of the same ranks go on while it is broken, and while it is reset."""
    pair, all_ranks = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    symm_mem.set_timeout(60, all_ranks)

    def right(group: Any, step: int) -> None:
        for op in OPS.values():
            case = op(group.rank(), group.size(), step, 1, group, step)
            assert torch.equal(case.call(), case.want())

    right(all_ranks, 0)
    if rank < 2:
        symm_mem.set_timeout(60, pair)
        right(pair, 0)
    dist.barrier()
    if rank == 0:
        symm_mem.set_timeout(0.3, pair)
        with pytest.raises(symm_mem.PeerTimeout) as error:
            right(pair, 1)
        assert error.value.group == pair.group_name and error.value.peer == 1
    right(all_ranks, 2)
    if rank < 2:
        symm_mem.set_timeout(60, pair)
        symm_mem.reset(pair)
    right(all_ranks, 3)  # its counts have gone on
    if rank < 2:
        right(pair, 4)


@on_ranks(3, fresh=True)
def test_what_ranks_make_together_they_make_again_after_a_reset(rank: int, world_size: int) -> None:
    """A rank comes when the others no longer wait for what is made together: after a reset all make it once more."""
    space: Workspace[Layout] = Workspace(get_heap(), Layout(world_size, 4, 1024), "site")
    of_graph = Workspace(get_heap(), Layout(world_size, 4, 1024), "graph", graph=KEPT)
    of_graph.prepared["kernel"] = "captured"
    made = []

    def come() -> None:
        if "kernel" not in space.prepared:  # as launchers do
            make_together(space, "an_op", "kernel", "the same", lambda: made.append(rank))
        made.append("called")

    symm_mem.set_timeout(0.3)
    if rank == 1:
        dist.barrier()
    with pytest.raises(symm_mem.PeerTimeout):
        come()
    if rank != 1:
        dist.barrier()
    symm_mem.set_timeout(5)
    symm_mem.reset()
    made.clear()
    for _ in range(2):
        come()
    assert made == [rank, "called", "called"]
    if rank == 0:  # made on a part of the ranks alone, which an error may leave, too
        symm_mem.set_timeout(0.3)
        space.prepared["late"] = "kernel"
        with pytest.raises(symm_mem.PeerTimeout):
            symm_mem.empty(8)
    symm_mem.set_timeout(5)
    symm_mem.reset()
    assert not space.prepared
    assert of_graph.prepared == {"kernel": "captured"}, (
        "what a captured graph runs must live as long as it does"
    )


@on_ranks(2, fresh=True)
def test_every_op_of_a_broken_group_is_refused_in_the_same_words(rank: int, world_size: int) -> None:
    """Rank 1 leaves a product out. Ops that rank 0 has never called before are refused without a wait for anybody."""
    case = OPS["fused_all_gather_matmul"](rank, world_size, 0, 1, dist.group.WORLD, 0)
    assert torch.equal(case.call(), case.want())
    dist.barrier()
    if rank == 0:
        symm_mem.set_timeout(0.3)
        with pytest.raises(symm_mem.PeerTimeout) as error:
            case.call()
        symm_mem.set_timeout(60)
        begin = time.monotonic()
        for checked in (False, True):
            symm_mem.set_checked(checked)
            for op in OPS.values():
                other = op(rank, world_size, 1, 1, dist.group.WORLD, 100)
                with pytest.raises(symm_mem.PeerTimeout) as again:
                    other.call()
                assert str(again.value) == str(error.value)
        symm_mem.set_checked(False)
        assert time.monotonic() - begin < 10
    symm_mem.set_timeout(60)
    symm_mem.reset()
    for op in OPS.values():
        case = op(rank, world_size, 2, 1, dist.group.WORLD, 0)
        assert torch.equal(case.call(), case.want())
