"""The process group "weft": every way that torch has to give a call, a wait or a group its deadline."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
from ranks import on_ranks, run_ranks
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch_versions import COMPILED_OUT_COLLECTIVES
from weft import symm_mem

GIVEN = timedelta(seconds=0.4)
GROUPS = 60  # seconds: what the group says


def group_of(seconds: float = GROUPS) -> Any:
    group: Any = dist.new_group(backend="weft", timeout=timedelta(seconds=seconds))
    calls = (
        lambda: dist.all_reduce(torch.ones(4), group=group),
        lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), group=group),
    )
    for call in calls:  # the first of each op, which is compared
        call()
    return group


def given(options: Any, *, asynchronous: bool = True) -> Any:
    options.timeout, options.asyncOp = GIVEN, asynchronous
    return options


@contextmanager
def within(low: float, high: float = 20.0) -> Any:
    begin = time.monotonic()
    yield
    assert low <= time.monotonic() - begin < high


FORMS: dict[str, Callable[[Any], Any]] = {
    "allreduce opts": lambda g: g.allreduce([torch.ones(4)], given(dist.AllreduceOptions())),
    "allreduce timeout": lambda g: g.allreduce([torch.ones(4)], dist.ReduceOp.SUM, GIVEN),
    "allreduce named": lambda g: g.allreduce(torch.ones(4), timeout=GIVEN),
    "allreduce that waits": lambda g: g.allreduce(
        [torch.ones(4)], given(dist.AllreduceOptions(), asynchronous=False)
    ),
    "allreduce_coalesced": lambda g: g.allreduce_coalesced(
        [torch.ones(4), torch.ones(2)], given(dist.AllreduceCoalescedOptions())
    ),
    "all_gather_into_tensor": lambda g: g._allgather_base(
        torch.empty(8), torch.ones(4), given(AllgatherOptions())
    ),
    "all_gather coalesced": lambda g: g.allgather_into_tensor_coalesced(
        [torch.empty(8)], [torch.ones(4)], given(AllgatherOptions())
    ),
    "reduce_scatter_tensor": lambda g: g._reduce_scatter_base(
        torch.empty(2), torch.ones(4), given(ReduceScatterOptions())
    ),
    "reduce_scatter coalesced": lambda g: g.reduce_scatter_tensor_coalesced(
        [torch.empty(2)], [torch.ones(4)], given(ReduceScatterOptions())
    ),
}


@on_ranks(2, fresh=True)
def test_of_a_call(rank: int, world_size: int) -> None:
    group = group_of()
    for form, call in FORMS.items():
        if rank == 0:
            said = (
                r"(all_\w+|reduce_\w+): rank 0 of group .* waited 0.4 s for rank 1: .* is \d+, expected \d+.*"
            )
            with within(0.35), pytest.raises(symm_mem.PeerTimeout, match=said + r"timeouts\.py") as caught:
                call(group).wait()
            assert caught.value.op in form.replace("allreduce", "all_reduce").replace(
                "gather coal", "gather_into_tensor coal"
            ).replace("scatter coal", "scatter_tensor coal")
            copy = pickle.loads(pickle.dumps(caught.value))
            assert (copy.op, copy.seconds) == (caught.value.op, 0.4)
        dist.barrier()
        symm_mem.reset(group)
        dist.all_reduce(torch.ones(4), group=group)
    assert {taken.by for taken in weft.process_group(group).calls()} == {"weft"}
    assert symm_mem.get_timeout(group) == GROUPS, "a call's deadline is that call's"


def waits(rank: int, world_size: int) -> None:
    """A wait's own deadline leaves the call and the group as they are."""
    group, x = group_of(), torch.full((4,), rank + 1.0)
    if rank == 0:
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
        for work in works:
            said = r"all_reduce: rank 0 of group .* waited 0.4 s for rank 1: flag 0 of rank 1 .*timeouts\.py"
            with within(0.35), pytest.raises(symm_mem.PeerTimeout, match=said):
                work.wait(GIVEN)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
    assert all(work.wait(timedelta(seconds=30)) for work in works)
    assert works[0].wait(timedelta(0)) and works[0].is_success(), "0 is torch's word for none"
    assert x.tolist() == [6.0] * 4


def test_of_a_wait() -> None:
    run_ranks(waits, 2, fresh=True)


@on_ranks(2, fresh=True)
def test_of_a_group(rank: int, world_size: int) -> None:
    ways: list[Callable[[Any], None]] = [
        lambda g: g.set_timeout(GIVEN),
        lambda g: dist.distributed_c10d._set_pg_timeout(GIVEN, g),
        lambda g: g._get_backend(torch.device("cpu")).set_timeout(GIVEN),
        lambda g: symm_mem.set_timeout(GIVEN.total_seconds(), g),
    ]
    for says in ways:
        group = group_of()
        assert symm_mem.get_timeout(group) == GROUPS
        says(group)
        if rank == 0:
            with within(0.35), pytest.raises(symm_mem.PeerTimeout, match=r"waited 0\.4 s for rank 1"):
                dist.all_reduce(torch.ones(4), group=group)
        dist.barrier()
    group = group_of(3)  # new_group(timeout=), as init_process_group(timeout=)
    if rank == 0:
        with within(2.9), pytest.raises(symm_mem.PeerTimeout, match="waited 3 s for rank 1"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


@on_ranks(2, fresh=True)
def test_of_what_gloo_sends_and_of_first_calls(rank: int, world_size: int) -> None:
    """What goes to gloo takes it along, and a first call's comparison has it, too."""
    group = group_of()
    calls: list[Callable[[], Any]] = [
        lambda: group.barrier(given(dist.BarrierOptions())),
        lambda: group.allreduce([torch.ones(4, dtype=torch.int32)], given(dist.AllreduceOptions())),
    ]
    for call in calls:
        if rank == 0:
            with within(0.2), pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                call().wait()
        dist.barrier()
        group = group_of()
    alone = dist.new_group(backend="weft", timeout=timedelta(seconds=GROUPS))
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=alone)
    if rank == 0:
        with within(0.35), pytest.raises(symm_mem.PeerTimeout, match=r"waited 0\.4 s for rank 1"):
            alone.allreduce([torch.ones(4)], given(dist.AllreduceOptions()))
    dist.barrier()


@on_ranks(2, fresh=True)
def test_forms_that_write_where_they_are_told(rank: int, world_size: int) -> None:
    """The forms that write into a given tensor, which Inductor puts in for buckets."""
    group, x = group_of(), torch.arange(4.0) + rank
    ops, name = torch.ops._c10d_functional, group.group_name
    weft.process_group(group).calls(clear=True)
    want = torch.cat([torch.arange(4.0) + r for r in range(world_size)])
    out = torch.full((8,), torch.nan)
    assert ops.wait_tensor(ops.all_gather_into_tensor_out(x, world_size, name, out=out)).equal(want)
    assert ops.wait_tensor(
        ops.all_gather_into_tensor_out(x[::2], world_size, name, out=torch.empty(4))
    ).equal(want[::2])

    def program(x: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_gather_into_tensor_out(x, world_size, name, out=x.new_empty(8))) * 2

    made = torch.compile(program) if COMPILED_OUT_COLLECTIVES else program
    assert made(x).equal(want * 2)
    counts = {"all_gather_into_tensor": 3}
    if hasattr(ops, "reduce_scatter_tensor_out"):
        counts["reduce_scatter_tensor"] = 1
        out = torch.full((2,), torch.nan)
        done = ops.wait_tensor(ops.reduce_scatter_tensor_out(x, "avg", world_size, name, out=out))
        assert done.equal(torch.arange(4.0).view(2, 2)[rank] + 0.5)
    assert {t.op: t.count for t in weft.process_group(group).calls(clear=True) if t.by == "weft"} == counts
    other = dist.new_group(backend="gloo")
    out = torch.full((8,), torch.nan)
    assert ops.wait_tensor(ops.all_gather_into_tensor_out(x, world_size, other.group_name, out=out)).equal(
        want
    ), "groups of other backends are theirs"
    symm_mem.set_timeout(0.4, group)
    if rank == 0:
        out = torch.empty(8)
        with pytest.raises(symm_mem.PeerTimeout, match=r"waited 0\.4 s for rank 1"):
            ops.wait_tensor(ops.all_gather_into_tensor_out(x, world_size, name, out=out))
    dist.barrier()
