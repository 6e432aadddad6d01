"""When the addresses of a heap that is gone are unmapped."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.symm_mem import forks
from weft.symm_mem.heap import mapped_range
from weft.symm_mem.heap.mapped_range import MappedRange, close_later, close_what_is_gone


class Backend:
    """Notes what is unmapped, and whether it was quiet then."""

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind)
        self.captures, self.quiet = False, False
        self.ended: list[tuple[str, int, int]] = []

    def quiesce(self) -> bool:
        self.quiet = not self.captures
        return self.quiet

    def reserve(self, size: int) -> int:
        return 1000

    def map(self, address: int, handle: int, size: int) -> None:
        pass

    def unmap(self, address: int, size: int) -> None:
        assert self.quiet or self.device.type == "cpu", "work may be under way"
        self.ended.append(("unmap", address, size))

    def release(self, address: int, size: int) -> None:
        self.ended.append(("release", address, size))


ALL = [
    ("unmap", 1000, 10),
    ("unmap", 1100, 10),
    ("unmap", 1010, 5),
    ("unmap", 1110, 5),
    ("release", 1000, 200),
]


def gone(backend: Any) -> tuple[Any, Callable[[], Any]]:
    made = MappedRange(backend, 200)
    for address, size in ((1000, 10), (1100, 10), (1010, 5), (1050, 8), (1110, 5)):
        made.map(address, 0, size)
    quiet, backend.quiet = backend.quiet, True
    made.unmap(1050, 8)
    made.unmap(1050, 8)
    assert backend.ended == [("unmap", 1050, 8)], "once"
    backend.ended.clear()
    backend.quiet = quiet
    return backend, made.close


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_range, "_put_off", type(mapped_range._put_off)())


def test_on_a_gpu_a_finalizer_leaves_it_to_the_next_allocation() -> None:
    backend = Backend()
    collector = threading.Thread(target=close_later, args=gone(backend))
    collector.start()
    collector.join()
    assert not backend.ended and not backend.quiet, "a finalizer waits for nothing"
    backend.captures = True
    close_what_is_gone()
    assert not backend.ended
    backend.captures = False
    close_what_is_gone()
    close_what_is_gone()
    assert backend.ended == ALL


def test_between_cpu_ranks_it_is_done_at_once() -> None:
    backend = Backend("cpu")
    close_later(*gone(backend))
    assert backend.ended == ALL


def test_a_forked_child_unmaps_nothing_of_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    close_later(*gone(backend))
    monkeypatch.setattr(forks, "pid", forks.pid + 1)
    close_what_is_gone()
    assert not backend.ended and not mapped_range._put_off


def let_go_of(rank: int, world_size: int) -> list[tuple[str, int, int]]:
    backend = Backend()
    close_later(*gone(backend))
    symm_mem.empty(3)
    return backend.ended


def test_an_allocation_unmaps_what_was_put_off() -> None:
    assert run_ranks(let_go_of, 2) == [ALL, ALL]


def goes_with_its_group(rank: int, world_size: int) -> int:
    """Without another call of weft."""
    group = dist.new_group([0, 1])
    tensor = symm_mem.empty(3, group=group)
    dist.barrier(group)

    def mapped() -> int:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum("memfd:weft" in line for line in maps)

    before = mapped()
    dist.destroy_process_group(group)
    del group
    assert mapped() == before and tensor.fill_(7).sum() == 21, "tensors stay"
    del tensor
    return before - mapped()


def test_a_heap_goes_with_its_group() -> None:
    assert all(ended > 0 for ended in run_ranks(goes_with_its_group, 2, fresh=True))


@pytest.mark.gpu
@on_ranks(2, device="cuda", fresh=True)
def test_another_threads_capture_goes_on_while_a_heap_goes(rank: int, world_size: int) -> None:
    x = torch.zeros(64)
    symm_mem.empty(3)
    group = dist.new_group(list(range(world_size)))
    symm_mem.empty(3, group=group)
    begun, goes_on = threading.Event(), threading.Event()
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        torch.cuda.set_device(x.device)
        with torch.cuda.graph(graph):
            x.add_(1)
            begun.set()
            goes_on.wait(60)
            x.add_(1)

    with ThreadPoolExecutor(1) as other:
        captured = other.submit(capture)
        try:
            assert begun.wait(60)
            dist.destroy_process_group(group)
            del group
            gc.collect()
            assert mapped_range._put_off
            kept = symm_mem.empty(5)
            assert mapped_range._put_off, "another thread captures"
        finally:
            goes_on.set()
        captured.result()
    graph.replay()
    torch.cuda.synchronize()
    assert (x == 2).all() and kept.numel() == 5
    symm_mem.empty(7)
    assert not mapped_range._put_off
