"""Which calls wait for which on a GPU, without one: streams and events only note what they are told."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from weft.fused_ops.dispatch import plan, stream_order
from weft.symm_mem import call_cache

GPU = torch.device("cuda", 0)


class Gpu:
    """Its streams, as lists of what was put on them; ``now`` and ``graphs`` say which one is current and captured."""

    def __init__(self) -> None:
        self.on: dict[int, list[Any]] = {}
        self.now = 1
        self.graphs: dict[int, int] = {}
        self.external: set[int] = set()
        self.destroyed: set[int] = set()
        self.turns: stream_order.StreamOrder

    def launch(self, what: Any) -> None:
        self.on.setdefault(self.now, []).append(what)

    def stream(self, number: int, device: int) -> SimpleNamespace:
        assert number not in self.destroyed
        return SimpleNamespace(work=self.on.setdefault(number, []))


class Event:
    behind: tuple[Any, ...] = ()

    def record(self, stream: SimpleNamespace) -> None:
        self.behind = tuple(stream.work)

    def wait(self, stream: SimpleNamespace) -> None:
        stream.work.append(("wait", self.behind[-1] if self.behind else None))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(stream_order, "on", plan.nullcontext)
    monkeypatch.setattr(stream_order, "_streams", gpu.stream)
    monkeypatch.setattr(stream_order, "_graph_of", lambda stream: gpu.graphs.get(stream, 0))
    monkeypatch.setattr(
        stream_order, "stream_and_graph", lambda device: (gpu.now, gpu.graphs.get(gpu.now, 0))
    )
    monkeypatch.setattr(stream_order, "is_external", lambda stream, device: stream in gpu.external)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    call_cache.invalidate_calls()  # what another test has found is of another GPU
    gpu.turns = stream_order.StreamOrder(1)
    monkeypatch.setattr(stream_order, "_turns_of", lambda index: gpu.turns)
    return gpu


def call(gpu: Gpu, stream: int, name: str) -> None:
    """The long way."""
    gpu.now = stream
    with stream_order.in_stream_order(GPU):
        gpu.launch(name)


def again(gpu: Gpu, stream: int, name: str) -> None:
    """The short way, as a finding leads to it: one of all threads."""
    gpu.now, kept = stream, call_cache.cached_calls
    before, behind = kept.get(("steps", stream)) or stream_order.steps_on(0, stream)
    kept["steps", stream] = before, behind
    if before is not None:
        before(stream)
    gpu.launch(name)
    if behind is not None:
        behind(stream)


def in_a_thread(body: Any) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


@pytest.mark.parametrize("way", [call, again])
def test_a_call_waits_for_the_last_one_of_another_stream_and_for_nothing_else(gpu: Gpu, way: Any) -> None:
    way(gpu, 1, "a")
    way(gpu, 1, "b")
    way(gpu, 2, "c")
    gpu.launch("a product")
    way(gpu, 1, "d")
    way(gpu, 1, "e")
    way(gpu, 2, "f")
    way(gpu, 3, "g")
    assert gpu.on == {
        1: ["a", "b", ("wait", "c"), "d", "e"],
        2: [("wait", "b"), "c", "a product", ("wait", "e"), "f"],
        3: [("wait", "f"), "g"],
    }


def test_one_stream_costs_nothing_and_a_second_one_ends_what_was_found(gpu: Gpu) -> None:
    kept = call_cache.cached_calls
    assert stream_order.steps_on(0, 1) == stream_order.steps_on(0, 1)
    assert stream_order.steps_on(0, 1)[1] is None
    assert call_cache.cached_calls is kept
    assert stream_order.steps_on(0, 2)[1] is not None
    assert call_cache.cached_calls is not kept
    kept = call_cache.cached_calls
    assert stream_order.steps_on(0, 1) == stream_order.steps_on(0, 2) and None not in stream_order.steps_on(
        0, 1
    )
    assert call_cache.cached_calls is kept


def test_threads_do_not_wait_for_each_other(gpu: Gpu) -> None:
    call(gpu, 1, "a")

    def other() -> None:
        call(gpu, 2, "b")
        call(gpu, 2, "c")
        call(gpu, 3, "d")

    in_a_thread(other)
    call(gpu, 1, "e")
    call(gpu, 2, "f")
    assert gpu.on == {1: ["a", "e"], 2: ["b", "c", ("wait", "e"), "f"], 3: [("wait", "c"), "d"]}


@pytest.mark.parametrize("way", [call, again])
def test_a_thread_waits_for_its_calls_by_what_another_one_has_found(gpu: Gpu, way: Any) -> None:
    again(gpu, 1, "a")

    def other() -> None:
        again(gpu, 1, "b")
        way(gpu, 2, "c")

    in_a_thread(other)
    assert gpu.on == {1: ["a", "b"], 2: [("wait", "b"), "c"]}


def test_threads_that_come_first_at_once_share_a_gpus_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    both, found = threading.Barrier(2, timeout=30), []
    there = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(stream_order, "_orders", {})
    monkeypatch.setattr(stream_order, "num_sms", lambda device: both.wait() * 0 + 132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: there)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    threads = [threading.Thread(target=lambda: found.append(stream_order._turns_of(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is stream_order._turns_of(0) is not None


def test_calls_of_one_graph_take_turns_and_have_nothing_to_do_with_others(gpu: Gpu) -> None:
    call(gpu, 1, "eager")
    gpu.graphs = {5: 77, 6: 77}
    call(gpu, 5, "a")
    gpu.launch("a product")
    call(gpu, 6, "b")
    call(gpu, 5, "c")
    gpu.graphs = {6: 78, 5: 78}
    call(gpu, 6, "in the next graph")
    gpu.graphs = {}
    call(gpu, 1, "eager, too")
    assert gpu.on == {
        1: ["eager", "eager, too"],
        5: ["a", "a product", ("wait", "b"), "c"],
        6: [("wait", "a"), "b", "in the next graph"],
    }
    assert stream_order.steps_on(0, 1)[1] is None, "capturing is not a second stream"


@pytest.mark.parametrize("graph", [77, stream_order._FAILED])
def test_no_wait_for_a_stream_that_is_being_captured(gpu: Gpu, graph: int) -> None:
    call(gpu, 1, "a")
    gpu.graphs = {1: graph}
    call(gpu, 2, "b")
    assert gpu.on == {1: ["a"], 2: ["b"]}


@pytest.mark.parametrize("status", ["ACTIVE", "INVALIDATED"])
def test_nothing_is_begun_on_a_stream_whose_capture_has_failed(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = SimpleNamespace(
        **{f"CU_STREAM_CAPTURE_STATUS_{name}": name for name in ("NONE", "ACTIVE", "INVALIDATED")}
    )
    driver = SimpleNamespace(
        CUstreamCaptureStatus=statuses,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuStreamGetCaptureInfo=lambda stream: (0, status, 77, None, [], [], 0),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", driver, raising=False)
    monkeypatch.setattr("weft.symm_mem.backends.vmm.driver", driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    if status == "ACTIVE":
        assert stream_order.stream_and_graph(GPU) == (5, 77)
    else:
        with pytest.raises(RuntimeError, match="captured into a CUDA graph, and that has failed"):
            stream_order.stream_and_graph(GPU)


def test_the_default_stream_is_no_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is 0. As torch has it: for that ExternalStream takes one out of its pool."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "ExternalStream", lambda stream, device: (stream or "of the pool", device))
    monkeypatch.setattr(cuda, "default_stream", lambda device: (0, device))
    stream_order._streams.cache_clear()
    assert [stream_order._streams(stream, 1) for stream in (0, 7)] == [(0, 1), (7, 1)]
    stream_order._streams.cache_clear()


@pytest.mark.parametrize(
    ("way", "graph"), [(call, 0), (again, 0), (call, 77)], ids=["long way", "short way", "captured"]
)
def test_where_two_calls_find_room_a_third_stream_is_one_too_many(gpu: Gpu, way: Any, graph: int) -> None:
    gpu.turns, gpu.graphs = stream_order.StreamOrder(2), dict.fromkeys((1, 2, 3), graph)
    for stream, name in ((1, "a"), (2, "b"), (1, "c"), (2, "d")):
        way(gpu, stream, name)
    assert gpu.on == {1: ["a", "c"], 2: ["b", "d"]}
    way(gpu, 3, "e")
    assert sorted(gpu.on[3][:2]) == [("wait", "c"), ("wait", "d")] and gpu.on[3][2:] == ["e"]
    for stream, name in ((1, "f"), (2, "g"), (2, "h")):
        way(gpu, stream, name)
    assert gpu.on[1][2:] == [("wait", "e"), "f"]
    assert gpu.on[2][2:] == [("wait", "f"), "g", "h"]
    gpu.graphs = dict.fromkeys((1, 2), graph + 1 if graph else 0)
    way(gpu, 1, "i")
    assert gpu.on[1][4:] == (["i"] if graph else [("wait", "h"), "i"])


def test_what_failed_in_front_of_its_launch_leaves_the_order_as_it_was(gpu: Gpu) -> None:
    gpu.turns = stream_order.StreamOrder(2)
    call(gpu, 1, "a")
    call(gpu, 2, "b")
    with pytest.raises(ZeroDivisionError), stream_order.in_stream_order(GPU):
        gpu.launch(1 / 0)
    gpu.now = 3
    with pytest.raises(ZeroDivisionError), stream_order.in_stream_order(GPU):
        gpu.launch(1 / 0)
    call(gpu, 4, "c")
    *waits, last = gpu.on[4]
    assert set(waits) == {("wait", "a"), ("wait", "b")} and last == "c"


def test_as_many_calls_find_room_as_their_multiprocessors_go_into_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: there)
    for reserved, room in (("0", 1), ("67", 1), ("68", 2), ("89", 2), ("90", 3), ("100", 4)):
        monkeypatch.setenv("WEFT_RESERVED_SMS", reserved)
        monkeypatch.setattr(stream_order, "_orders", {})
        plan.num_sms.cache_clear()
        assert stream_order._turns_of(0)._room == room
    plan.num_sms.cache_clear()


@pytest.mark.parametrize("way", [call, again])
def test_a_stream_without_a_call_for_a_while_is_forgotten(
    gpu: Gpu, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warm-up on a side stream costs no event for ever. What lies there is waited for all the same."""
    monkeypatch.setattr(stream_order, "_WINDOW", 5)
    with ThreadPoolExecutor(1) as other:
        other.submit(way, gpu, 2, "a").result()
        way(gpu, 1, "b")
        assert stream_order.steps_on(0, 1)[1] is not None
        for i in range(10):
            way(gpu, 1, i)
        assert stream_order.steps_on(0, 1) == (gpu.turns.alone, None)
        assert gpu.on == {1: ["b", *range(10)], 2: ["a"]}
        other.submit(way, gpu, 1, "c").result()
        other.submit(way, gpu, 1, "d").result()
        assert gpu.on[1][11:] == [("wait", "a"), "c", "d"]
    way(gpu, 3, "e")
    assert gpu.on[3] == [("wait", "d"), "e"] and stream_order.steps_on(0, 1)[1] is not None
    for i in range(30):  # both are called
        way(gpu, 1 + 2 * (i % 2), i)
    assert stream_order.steps_on(0, 1)[1] is not None


@pytest.mark.parametrize("way", [call, again])
def test_an_external_stream_is_not_touched_behind_its_call(gpu: Gpu, way: Any) -> None:
    """It may be gone. Its handle may be another stream's then, whose calls wait like those of any other."""
    gpu.external = {9}
    way(gpu, 1, "a")
    way(gpu, 9, "b")
    gpu.destroyed = {9}
    way(gpu, 1, "c")
    assert gpu.on == {1: ["a", ("wait", "b"), "c"], 9: [("wait", "a"), "b"]}
    gpu.destroyed, gpu.on[9] = set(), []
    way(gpu, 9, "d")
    gpu.on[9] = []  # once more
    call_cache.invalidate_calls()
    way(gpu, 9, "e")
    assert gpu.on == {1: ["a", ("wait", "b"), "c"], 9: [("wait", "d"), "e"]}
    gpu.destroyed = {9}
    way(gpu, 1, "f")
    assert gpu.on[1][3:] == [("wait", "e"), "f"]


def test_what_is_external_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch numbers its own streams, the number of another one is its address."""
    numbers = {0: 0, 0x5500: 35, 0x7700: 0x7700}
    ids = iter([7, 8])
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuStreamGetId=lambda stream: (0, next(ids))
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", driver, raising=False)
    monkeypatch.setattr("weft.symm_mem.backends.vmm.driver", driver)
    now = [0]
    current = lambda device: (numbers[now[0]], device, 1)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", current, raising=False)
    for now[0], key in ((0, 0), (0x5500, 0x5500), (0x7700, (0x7700, 7)), (0x7700, (0x7700, 8))):
        assert stream_order.stream_key(now[0], 0) == key
