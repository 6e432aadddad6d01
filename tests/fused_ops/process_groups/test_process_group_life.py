"""The process group "weft": how it is made and ends, its deadlines, and calls that overlap."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
from metadata import write_metadata
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.symm_mem.heap.registry import heaps_of


def total(group: Any, rank: int, n: int = 3) -> None:
    x = torch.full((n,), rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [dist.get_world_size(group) * (dist.get_world_size(group) + 1) / 2] * n


def is_default(rank: int, world_size: int, folder: Path) -> None:
    for i, (name, kinds) in enumerate(
        (("weft", "cpu"), ("cpu:weft,cuda:weft", "cpu"), ("cpu:weft", "cpu"), ("cpu:gloo,cuda:weft", ""))
    ):
        dist.destroy_process_group()
        place = {"init_method": f"file://{folder}/store{i}", "rank": rank, "world_size": world_size}
        dist.init_process_group(name, **place, timeout=timedelta(seconds=77))
        group, mine = dist.group.WORLD, weft.process_group()
        assert (
            type(group) is weft.fused_ops.WeftProcessGroup
            and dist.get_backend() == name
            and weft.fused_ops.is_weft_group()
        )
        assert (group.rank(), group.size(), group.name()) == (rank, world_size, "gloo")
        assert mine.taken_on == ((kinds,) if kinds else ())
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        assert symm_mem.get_timeout() == 77
        total(None, rank)
        assert {call.by for call in mine.calls()} == {"weft" if kinds else "gloo"}
        inherits = dist.new_group([1, 0])
        assert weft.fused_ops.is_weft_group(inherits)
        total(inherits, inherits.rank())
        store = group.get_group_store()
        store.set(f"{rank}", "here")
        assert store.get(f"{1 - rank}") == b"here"


def test_as_the_default_group(tmp_path: Path) -> None:
    run_ranks(is_default, 2, tmp_path, fresh=True)


@on_ranks(2, fresh=True)
def test_what_is_refused(rank: int, world_size: int) -> None:
    assert not weft.fused_ops.is_weft_group()
    with pytest.raises(TypeError, match="group: its backend is 'gloo', must be 'weft'"):
        weft.process_group()
    with pytest.raises(TypeError, match="group: must be a name"):
        weft.process_group(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend: is xpu:ucc with weft, must be gloo or nccl"):
        dist.new_group(backend="cpu:weft,xpu:ucc")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="this process has no GPU"):
            dist.new_group(backend="cuda:weft")
    alone = dist.new_group([0], backend="weft")
    if rank == 0:
        total(alone, 0)
        assert (
            str(weft.process_group(alone).calls()[0]) == "all_reduce: 1 call by gloo (the group has one rank)"
        )


@on_ranks(2, fresh=True)
def test_calls_without_a_wait(rank: int, world_size: int) -> None:
    """A call without a wait waits for nobody, and calls keep their order."""
    group, box = dist.new_group(backend="weft"), torch.zeros(1)
    total(group, rank)
    x = torch.full((5,), rank + 1.0)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        assert not work.is_completed()
        dist.send(torch.ones(1), 1, group=group)
    else:
        dist.recv(box, 0, group=group)
        work = dist.all_reduce(x, group=group, async_op=True)
    assert work.wait() and x.tolist() == [3] * 5
    seen = []
    tensors = [torch.full((4,), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(t, group=group, async_op=i % 3 != 0) for i, t in enumerate(tensors)]
    for work in works:
        if work is not None:
            work.get_future().then(lambda future: seen.append(future.value()[0][0].item())).wait()
    assert [t[0].item() for t in tensors] == [2.0 * i + 1 for i in range(20)]
    assert seen == [2.0 * i + 1 for i in range(20) if i % 3]


@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_come(rank: int, world_size: int) -> None:
    for asynchronous in (False, True):
        group = dist.new_group(backend="weft", timeout=timedelta(seconds=1))
        total(group, rank)
        if rank == 0:
            begin = time.monotonic()
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True) if asynchronous else None
            wait = (
                work.wait if asynchronous else lambda group=group: dist.all_reduce(torch.ones(3), group=group)
            )
            with pytest.raises(symm_mem.PeerTimeout, match=r"all_reduce: rank 0 .* waited 1 s for rank 1"):
                wait()
            assert 0.9 < time.monotonic() - begin < 10
            with pytest.raises(symm_mem.PeerTimeout):
                dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()
        symm_mem.reset(group)
        total(group, rank)
    group.set_timeout(timedelta(seconds=9))
    assert symm_mem.get_timeout(group) == 9


@on_ranks(2, fresh=True)
def test_first_calls_that_differ(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="weft", timeout=timedelta(seconds=2))
    with pytest.raises(symm_mem.RankMismatch, match=r"all_reduce\(dtype=torch.float32, elements=4"):
        dist.all_reduce(torch.ones(3 + rank), group=group)
    total(group, rank)
    group = dist.new_group(backend="weft", timeout=timedelta(seconds=2))
    begin = time.monotonic()
    with pytest.raises(RuntimeError):  # one waits in weft, the other one in gloo
        dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.int32)[rank]), group=group)
    assert time.monotonic() - begin < 20


def ends(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="weft")
    total(group, rank)
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    work.wait()
    assert heaps_of(group)
    name = group.group_name
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="no process group is named"):
        weft.process_group(name)
    del group, work
    gc.collect()
    half = dist.new_group(backend="weft").split_group([0, 1], group_name="half")
    assert (
        isinstance(half, weft.fused_ops.WeftProcessGroup) and half.group_name == "half" and half.size() == 2
    )
    x = torch.ones(3)
    half.allreduce([x]).wait()
    assert x.tolist() == [2] * 3
    why = "torch does not know the group by its name"  # dist.split_group would tell it
    assert [str(call) for call in half.record.calls()] == [f"all_reduce: 1 call by gloo ({why})"]
    aborted = dist.new_group(backend="weft")
    total(aborted, rank)
    if rank == 0:
        with pytest.raises(symm_mem.PeerTimeout, match="rank 1"):
            dist.all_reduce(torch.ones(3), group=aborted)
    else:
        time.sleep(0.3)
        dist.distributed_c10d._abort_process_group(aborted)


def test_how_it_ends() -> None:
    run_ranks(ends, 2, fresh=True)


def in_detail(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="weft", timeout=timedelta(seconds=10))
    assert symm_mem.is_checked()
    total(group, rank)
    dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), group)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(3 + rank), group=group),
        lambda: dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.bfloat16)[rank]), group=group),
        lambda: dist.all_reduce(torch.ones(3), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank], group),
        lambda: (
            dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), group)
            if rank
            else dist.all_reduce(torch.ones(3), group=group)
        ),
    ]
    for call in calls:
        with pytest.raises(symm_mem.RankMismatch, match="rank 1 asked for"):
            call()
        total(group, rank)
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
        dist.all_reduce(torch.ones(3 + rank, dtype=torch.int32), group=group)


def in_detail_but_unchecked(rank: int, world_size: int) -> None:
    assert not symm_mem.is_checked()


def test_in_torchs_debug_mode() -> None:
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    run_ranks(in_detail, 2, env=detail, fresh=True)
    run_ranks(in_detail_but_unchecked, 1, env={**detail, "WEFT_CHECK": "0"}, fresh=True)


PROGRAM = """
import sys
{first}
import torch, torch.distributed as dist
{then}
assert "weft.fused_ops" not in sys.modules
assert dist.is_backend_available("weft")
assert "weft.fused_ops" not in sys.modules
dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
import weft
print(weft.fused_ops.is_weft_group(), type(dist.group.WORLD).__name__)
"""


@pytest.mark.parametrize(
    ("first", "then"),
    [("", "import weft"), ("import weft", "import weft.fused_ops; sys.modules.pop('weft.fused_ops')")],
)
def test_weft_is_imported_by_the_first_group(first: str, then: str) -> None:
    program = PROGRAM.format(first=first, then=then)
    if first:  # without the installed distribution torch does not look at weft by itself
        program = program.replace('assert "weft.fused_ops" not in sys.modules\n', "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True WeftProcessGroup", done.stderr


def test_no_import_of_weft_is_needed_where_it_is_installed(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first="", then="")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == "True WeftProcessGroup", done.stderr
