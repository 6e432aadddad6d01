"""The process group "weft": callbacks that communicate, and threads of a rank that wait for each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import weft
from ranks import on_ranks
from torch import Tensor
from weft import symm_mem
from weft.fused_ops.process_groups import host_calls
from weft.symm_mem import timeouts
from weft.symm_mem.heap.registry import get_heap

Returns = Callable[[Any], Any]


def weft_group(seconds: float) -> Any:
    group = dist.new_group(backend="weft", timeout=timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(3), group=group)
    return group


def started(group: Any, x: Tensor) -> Any:
    return dist.all_reduce(x, group=group, async_op=True)


@on_ranks(2, fresh=True)
def test_callbacks_communicate(rank: int, world_size: int) -> None:
    """``first``: the rank that has its callback in place before the call can end, so that another thread calls it."""
    group = weft_group(60)
    for case in (in_then, in_done_callback, three_deep, among_synchronous, not_waited_for):
        for first in range(world_size):
            xs = [torch.randn(7, generator=torch.Generator().manual_seed(17 * rank + i)) for i in range(5)]
            sums = [x.double() for x in xs]
            for total in sums:
                dist.all_reduce(total)  # by gloo
            begin, threads = time.monotonic(), set[str]()

            def attach(callback: Returns, xs: list[Tensor] = xs, first: int = first) -> Any:
                if rank != first:
                    dist.recv(torch.empty(1), first)
                future = started(group, xs[0]).get_future()
                then = callback(future)
                for peer in range(world_size) if rank == first else ():
                    if peer != rank:
                        dist.send(torch.empty(1), peer)
                return then

            made = case(group, xs, attach, threads)
            assert rank != first or any(name.startswith("weft group") for name in threads), threads
            for x, total in zip(xs[:made], sums, strict=False):
                torch.testing.assert_close(x.double(), total, rtol=1e-6, atol=1e-6)
            assert time.monotonic() - begin < 30, case
            dist.barrier()
    assert {call.by for call in weft.process_group(group).calls()} == {"weft"}
    group._host.end()
    time.sleep(0.1)
    assert not [t for t in threading.enumerate() if t.name.startswith("weft group")], (
        "they end with the group"
    )


def here(threads: set[str]) -> None:
    threads.add(threading.current_thread().name)


def in_then(group: Any, xs: list[Tensor], attach: Any, threads: set[str]) -> int:
    def again(future: Any) -> Tensor:
        here(threads)
        assert future.value()[0] is xs[0]
        started(group, xs[1]).wait()
        return xs[1]

    assert attach(lambda future: future.then(again)).wait() is xs[1]
    return 2


def in_done_callback(group: Any, xs: list[Tensor], attach: Any, threads: set[str]) -> int:
    ended = threading.Event()

    def again(_: Any) -> None:
        here(threads)
        started(group, xs[1]).wait()
        ended.set()

    attach(lambda future: future.add_done_callback(again))
    assert ended.wait(5)
    return 2


def three_deep(group: Any, xs: list[Tensor], attach: Any, threads: set[str]) -> int:
    def at(depth: int) -> Returns:
        def again(_: Any) -> int:
            here(threads)
            if depth == len(xs) - 1:
                return depth
            return started(group, xs[depth + 1]).get_future().then(at(depth + 1)).wait()  # type: ignore[no-any-return]

        return again

    assert attach(lambda future: future.then(at(0))).wait() == len(xs) - 1
    return len(xs)


def among_synchronous(group: Any, xs: list[Tensor], attach: Any, threads: set[str]) -> int:
    def again(_: Any) -> None:
        here(threads)
        work = started(group, xs[1])
        dist.all_reduce(xs[2], group=group)  # after one without a wait
        started(group, xs[3]).wait()  # and before one
        work.wait()

    attach(lambda future: future.then(again)).wait()
    return 4


def not_waited_for(group: Any, xs: list[Tensor], attach: Any, threads: set[str]) -> int:
    """What a callback leaves to others to wait for, as hooks that return a future do."""

    def again(_: Any) -> Any:
        here(threads)
        return started(group, xs[1]).get_future()

    inner = attach(lambda future: future.then(again)).wait()
    assert inner.wait()[0] is xs[1]
    return 2


@on_ranks(2, fresh=True)
def test_callbacks_that_differ_between_ranks(rank: int, world_size: int) -> None:
    """A callback that communicates on one rank only."""
    group = weft_group(1)

    def again(_: Any) -> None:
        if rank == 0:
            started(group, torch.ones(5)).wait()

    begin = time.monotonic()
    future = started(group, torch.ones(4)).get_future().then(again)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"all_reduce: rank 0 of group .* waited 1 s for rank 1: flag"):
            future.wait()
    else:
        future.wait()
    dist.barrier()
    said = r"waited 1 s for rank 1" if rank == 0 else r"rank 1 of group .* for rank 0: .*it has given up"
    if rank == 1:  # this one meets what rank 0 has sent already
        dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(symm_mem.PeerTimeout, match=said):
        dist.all_reduce(torch.ones(3), group=group)
    assert 0.9 < time.monotonic() - begin < 30
    symm_mem.reset(group)
    dist.all_reduce(x := torch.ones(3), group=group)
    assert x.tolist() == [2.0] * 3


@on_ranks(2, fresh=True)
def test_waits_for_own_threads_end(rank: int, world_size: int) -> None:
    """Each wait for a thread of the rank's own ends, and says who waits for whom."""
    group = weft_group(0.4)
    (workspace,) = (w for w in get_heap(group).workspaces.values())
    with mock.patch.object(timeouts, "GRACE", 0.2):
        a_thread_does_not_go_on(group)
        a_call_inside_of_a_call(group)
        a_thread_has_the_workspace(group, workspace)
    dist.barrier()
    symm_mem.reset(group)
    if (child := os.fork()) == 0:
        work = host_calls.HostWork([torch.ones(3)], workspace, lambda: None)
        try:
            work.wait()
        except symm_mem.ForkedProcess:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def a_thread_does_not_go_on(group: Any) -> None:
    run, stays, x = host_calls.HostExchange.run, threading.Event(), torch.ones(3)

    def stuck(exchange: Any) -> None:
        stays.wait(20)
        run(exchange)

    said = r"all_reduce in group .*: waited \d s for thread 'weft group .*' of this rank, which .* "
    with mock.patch.object(host_calls.HostExchange, "run", stuck):
        works = [started(group, x), started(group, x)]
        for work in works:
            with pytest.raises(
                symm_mem.WeftError, match=said + r"all_reduce \(called at .*callbacks\.py:\d+\)"
            ):
                work.wait()
        stays.set()
        for work in works:
            assert work._ended.wait(20) and work.wait()
    assert x.tolist() == [4.0] * 3, "it went on"


def a_call_inside_of_a_call(group: Any) -> None:
    """Of the same thread, as from a signal's handler."""
    x = torch.ones(3)

    def inside(exchange: Any) -> None:
        for call in (lambda: dist.all_reduce(x, group=group), lambda: started(group, x).wait()):
            with pytest.raises(
                symm_mem.WeftError, match=r"thread 'MainThread' of this rank would wait for itself"
            ):
                call()
        group._host._tasks.clear()  # what was started in there

    with mock.patch.object(host_calls.HostExchange, "run", inside):
        dist.all_reduce(x, group=group)


def a_thread_has_the_workspace(group: Any, workspace: Any) -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with workspace.lock:
            held.set()
            free.wait(20)

    holder = threading.Thread(target=hold, name="holder")
    holder.start()
    held.wait(20)
    said = r"waited for a workspace of group .*: thread 'holder' of this rank has it .* not gone on for \d s"
    with pytest.raises(symm_mem.WeftError, match=said):
        dist.all_reduce(torch.ones(3), group=group)
    free.set()
    holder.join()
