"""What a group may be given as, and what is said of what is none."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from weft import symm_mem
from weft.fused_ops import one_shot_all_reduce
from weft.symm_mem import timeouts
from weft.symm_mem.heap.registry import get_heap


@on_ranks(2)
def test_a_rank_that_is_no_member_is_told_so(rank: int, world_size: int) -> None:
    """A rank outside of a group is told so; torch gives it a number, or has no group for it."""
    group = dist.new_group([0])
    line = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    plane = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
    for given, words in [
        (group, "group: is what new_group gave a rank that is no member"),
        (line, "group: the mesh does not hold this rank"),
        ((line, "tp"), "group: the mesh does not hold this rank"),
        ((plane, 1), "group: the mesh does not hold this rank"),
        ((plane, "dp"), "group: the mesh does not hold this rank"),
    ]:
        if rank == 0:
            assert symm_mem.resolve_group(given).size() == 1
        else:
            with pytest.raises(ValueError, match=words):
                symm_mem.resolve_group(given)
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    assert symm_mem.resolve_group((mesh, "tp")).size() == 2
    for of in ("tp", "dp"):
        if mesh.get_group(of) is not dist.group.WORLD:
            dist.destroy_process_group(mesh.get_group(of))
            for given in (mesh[of], (mesh, of)):
                with pytest.raises(ValueError, match="group: the mesh's process group was destroyed"):
                    symm_mem.resolve_group(given)
    for number in (7, -100.0):
        with pytest.raises(TypeError, match="group: must be a name"):
            symm_mem.resolve_group(number)  # type: ignore[arg-type]


@on_ranks(2, fresh=True)
def test_a_deadline_goes_with_its_group(rank: int, world_size: int) -> None:
    """A destroyed group's deadline is not that of the next one with its name, though the program keeps the group."""
    symm_mem.set_timeout(7)
    symm_mem.set_timeout(8, "to come")
    assert symm_mem.get_timeout("to come") == 8, "of a group yet to be made"
    kept, default = [], timeouts.default_timeout()
    for seconds in (8, default):
        group = dist.new_group([0, 1], group_desc="to come")
        kept.append(group)
        dist.distributed_c10d._register_process_group("to come", group)
        assert symm_mem.get_timeout("to come") == seconds
        dist.destroy_process_group(group)
        dist.distributed_c10d._unregister_process_group("to come")
    for seconds, name in ((7, None), (default, "to come")):
        assert symm_mem.get_timeout(name) == seconds


@on_ranks(2, fresh=True)
def test_a_group_that_has_been_destroyed_is_named(rank: int, world_size: int) -> None:
    """A program that keeps a group beyond its end is told so, where torch speaks of a value that was None."""
    group = dist.new_group([0, 1])
    kept = symm_mem.rendezvous(symm_mem.empty(4, group=group))
    kept.barrier()
    dist.destroy_process_group(group)
    for call in (
        lambda: symm_mem.empty(4, group=group),
        lambda: get_heap(group),
        lambda: symm_mem.unavailable(group),
        lambda: symm_mem.reset(group),
    ):
        with pytest.raises(ValueError, match=f"group: '{group.group_name}' has been destroyed"):
            call()
    symm_mem.check(group)
    assert kept.tensors[rank].fill_(rank).sum() == 4 * rank


@on_ranks(2, fresh=True)
def test_a_forked_child_collects_what_a_destroyed_group_has_left(rank: int, world_size: int) -> None:
    """Groups that are destroyed, also one that was used, are no business of a child's collector."""
    gc.collect()
    gc.disable()
    for _ in range(2):  # the second heap lets go of the first
        group = dist.new_group(list(range(world_size)))
        one_shot_all_reduce(torch.ones(4), "sum", group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    until = time.monotonic() + 20
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child's collector hangs")
        time.sleep(0.05)
