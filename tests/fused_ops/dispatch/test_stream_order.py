"""Which calls wait for which on a GPU, without one: streams and events only note what they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from fake_gpu import Gpu
from weft.fused_ops.dispatch import plan, stream_order
from weft.symm_mem import call_cache
from weft.symm_mem.backends import cuda_state

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    gpu.now = 1
    monkeypatch.setattr(cuda_state, "state", gpu)
    call_cache.invalidate_calls()  # what another test has found is of another GPU
    plan.num_sms.cache_clear()
    yield gpu
    plan.num_sms.cache_clear()


def call(gpu: Gpu, stream: int, name: str) -> None:
    """The slow path."""
    gpu.now = stream
    with stream_order.in_stream_order(GPU):
        gpu.launch(name)


def fast(gpu: Gpu, stream: int, name: str) -> None:
    """The fast path, as a cached call leads to it: one of all threads."""
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


@pytest.mark.parametrize("way", [call, fast])
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


def test_one_stream_costs_nothing_and_a_second_one_drops_all_cached_calls(gpu: Gpu) -> None:
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


@pytest.mark.parametrize("way", [call, fast])
def test_a_thread_waits_for_its_calls_by_what_another_one_has_found(gpu: Gpu, way: Any) -> None:
    fast(gpu, 1, "a")

    def other() -> None:
        fast(gpu, 1, "b")
        way(gpu, 2, "c")

    in_a_thread(other)
    assert gpu.on == {1: ["a", "b"], 2: [("wait", "b"), "c"]}


def test_threads_that_come_first_at_once_share_a_gpus_order(gpu: Gpu) -> None:
    both, come, found = threading.Barrier(2, timeout=30), set(), []

    def num_sms(device: torch.device) -> int:
        if (thread := threading.get_ident()) not in come:
            come.add(thread)
            both.wait()
        return 132

    gpu.num_sms = num_sms  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda: found.append(stream_order.order_of(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is stream_order.order_of(0)


def test_calls_of_one_graph_are_ordered(gpu: Gpu) -> None:
    call(gpu, 1, "eager")
    gpu.graphs = dict.fromkeys((5, 6), ("ACTIVE", 77))
    call(gpu, 5, "a")
    gpu.launch("a product")
    call(gpu, 6, "b")
    call(gpu, 5, "c")
    gpu.graphs = dict.fromkeys((5, 6), ("ACTIVE", 78))
    call(gpu, 6, "in the next graph")
    gpu.graphs = {}
    call(gpu, 1, "eager, too")
    assert gpu.on == {
        1: ["eager", ("wait", None), "eager, too"],
        5: ["replays wait", "a", "a product", ("wait", "b"), "c"],
        6: [("wait", "a"), "b", "replays wait", "in the next graph"],
    }
    for destroyed in (*gpu.held["ACTIVE", 77], *gpu.held["ACTIVE", 78]):
        destroyed()
    stream_order.order_of(0)._forget_graphs()
    assert stream_order.steps_on(0, 1)[1] is None, "capturing is not a second stream"


@pytest.mark.parametrize("graph", [("ACTIVE", 77), ("INVALIDATED", 0)])
def test_no_wait_for_a_stream_that_is_being_captured(gpu: Gpu, graph: tuple[str, int]) -> None:
    call(gpu, 1, "a")
    gpu.graphs = {1: graph}
    call(gpu, 2, "b")
    assert gpu.on == {1: ["a"], 2: ["b"]}


def test_nothing_is_begun_on_a_stream_whose_capture_has_failed(gpu: Gpu) -> None:
    gpu.graphs = {1: ("ACTIVE", 77)}
    assert stream_order.stream_and_graph(GPU) == (1, 77)
    gpu.graphs = {1: ("INVALIDATED", 0)}
    with pytest.raises(RuntimeError, match="captured into a CUDA graph, and that has failed"):
        stream_order.stream_and_graph(GPU)


def test_captures_as_the_driver_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of its enumeration, which say the same in each version."""
    status = driver.CUstreamCaptureStatus
    for name, graph in (("NONE", 0), ("ACTIVE", 77), ("INVALIDATED", 0)):
        found = (
            driver.CUresult.CUDA_SUCCESS,
            getattr(status, f"CU_STREAM_CAPTURE_STATUS_{name}"),
            graph,
            None,
            [],
            [],
            0,
        )
        monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda stream, found=found: found)
        assert cuda_state.CudaState().capture_of(5) == (name, graph)


def test_the_default_stream_is_no_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is 0. As torch has it: for that ExternalStream takes one out of its pool."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "ExternalStream", lambda stream, device: (stream or "of the pool", device))
    monkeypatch.setattr(cuda, "default_stream", lambda device: (0, device))
    cuda_state.CudaState.stream.cache_clear()
    assert [cuda_state.state.stream(stream, 1) for stream in (0, 7)] == [(0, 1), (7, 1)]
    cuda_state.CudaState.stream.cache_clear()


@pytest.mark.parametrize(
    ("way", "graph"), [(call, 0), (fast, 0), (call, 77)], ids=["slow path", "fast path", "captured"]
)
def test_where_two_calls_find_room_a_third_stream_is_one_too_many(gpu: Gpu, way: Any, graph: int) -> None:
    gpu.orders[0] = stream_order.StreamOrder(2)
    if graph:
        gpu.graphs = dict.fromkeys((1, 2, 3), ("ACTIVE", graph))
    for stream, name in ((1, "a"), (2, "b"), (1, "c"), (2, "d")):
        way(gpu, stream, name)
    assert gpu.on == {1: ["a", "c"], 2: ["b", "d"]}
    way(gpu, 3, "e")
    assert sorted(gpu.on[3][:2]) == [("wait", "c"), ("wait", "d")] and gpu.on[3][2:] == ["e"]
    for stream, name in ((1, "f"), (2, "g"), (2, "h")):
        way(gpu, stream, name)
    assert gpu.on[1][2:] == [("wait", "e"), "f"]
    assert gpu.on[2][2:] == [("wait", "f"), "g", "h"]
    if graph:
        gpu.graphs = dict.fromkeys((1, 2), ("ACTIVE", graph + 1))
    way(gpu, 1, "i")
    assert gpu.on[1][4:] == (["i"] if graph else [("wait", "h"), "i"])


def test_what_failed_in_front_of_its_launch_leaves_the_order_as_it_was(gpu: Gpu) -> None:
    gpu.orders[0] = stream_order.StreamOrder(2)
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


def test_as_many_calls_find_room_as_their_sms_go_into_all(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for reserved, room in (("0", 1), ("67", 1), ("68", 2), ("89", 2), ("90", 3), ("100", 4)):
        monkeypatch.setenv("WEFT_RESERVED_SMS", reserved)
        gpu.orders.clear()
        plan.num_sms.cache_clear()
        assert stream_order.order_of(0).room == room


@pytest.mark.parametrize("way", [call, fast])
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
        assert stream_order.steps_on(0, 1) == (stream_order.order_of(0).alone, None)
        assert gpu.on == {1: ["b", *range(10)], 2: ["a"]}
        other.submit(way, gpu, 1, "c").result()
        other.submit(way, gpu, 1, "d").result()
        assert gpu.on[1][11:] == [("wait", "a"), "c", "d"]
    way(gpu, 3, "e")
    assert gpu.on[3] == [("wait", "d"), "e"] and stream_order.steps_on(0, 1)[1] is not None
    for i in range(30):  # both are called
        way(gpu, 1 + 2 * (i % 2), i)
    assert stream_order.steps_on(0, 1)[1] is not None


@pytest.mark.parametrize("way", [call, fast])
def test_an_external_stream_is_not_touched_behind_its_call(gpu: Gpu, way: Any) -> None:
    """It may be gone. Its handle may be another stream's then, whose calls wait like those of any other."""
    gpu.external = {9: 1}
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


def test_what_is_external_has_its_own_key(gpu: Gpu) -> None:
    for gpu.now, number, key in (
        (0, 0, 0),
        (0x5500, 0, 0x5500),
        (0x7700, 7, (0x7700, 7)),
        (0x7700, 8, (0x7700, 8)),
    ):
        gpu.external = {gpu.now: number} if number else {}
        assert stream_order.stream_key(gpu.now, 0) == key
    gpu.now, gpu.external = 0, {0: 9}
    assert stream_order.stream_key(0, 0) == 0, "the default stream's address is its number, too"


def test_beside_a_graph_each_call_waits_and_is_waited_for_until_it_is_gone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_order, "_WINDOW", 3)
    fast(gpu, 1, "before")
    gpu.graphs = {5: ("ACTIVE", 77)}
    call(gpu, 5, "a")
    call(gpu, 5, "b")
    gpu.graphs = {}
    assert gpu.on[5] == ["replays wait", "a", "b"]
    fast(gpu, 1, "c")
    call(gpu, 1, "d")
    in_a_thread(lambda: fast(gpu, 2, "of another thread"))
    assert gpu.on[1] == ["before", ("wait", None), "c", ("wait", "c"), "d"]
    assert gpu.on[2] == [("wait", None), "of another thread"]
    for destroyed in gpu.held["ACTIVE", 77]:
        destroyed()
    for name in "efghi":
        fast(gpu, 1, name)
    assert gpu.on[1][5:] == [
        ("wait", "d"),
        "e",
        ("wait", "e"),
        "f",
        ("wait", "f"),
        "g",
        ("wait", "g"),
        "h",
        "i",
    ]
    assert stream_order.steps_on(0, 1)[1] is None
