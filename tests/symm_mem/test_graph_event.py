"""An event of streams and graphs, of a driver that is made up: which nodes a graph gets, and what they come after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver
from weft.symm_mem.backends import graph_event
from weft.symm_mem.backends.graph_event import GraphEvent

_OK = driver.CUresult.CUDA_SUCCESS
STREAM, EVENT = 7, 70


class Driver:
    """``edges``: of each node of the graph that is captured, what it comes after. ``last``: what the next one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.edges: dict[str, list[str]] = {}
        self.last = ["kernel"]
        self.on_streams: list[tuple[Any, ...]] = []
        self.result = 0
        for name in dir(self):
            if name.startswith("cu"):
                monkeypatch.setattr(driver, name, getattr(self, name))

    def cuGetErrorString(self, error: Any) -> tuple[Any, ...]:
        return _OK, b"said"

    def cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        assert flags == driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return _OK, EVENT

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        assert stream == STREAM
        return _OK, "active", 3, "graph", list(self.last), None, len(self.last)

    def _add(self, name: str, graph: str, behind: list[str], count: int, event: int) -> tuple[Any, ...]:
        assert graph == "graph" and event == EVENT and count == len(behind)
        node = f"{name} {len(self.edges)}"
        self.edges[node] = list(behind)
        return _OK, node

    def cuGraphAddEventWaitNode(self, *args: Any) -> tuple[Any, ...]:
        return self._add("wait", *args)

    def cuGraphAddEventRecordNode(self, *args: Any) -> tuple[Any, ...]:
        return self._add("record", *args)

    def cuStreamUpdateCaptureDependencies(self, stream: int, nodes: Any, _: Any, count: int, how: int) -> Any:
        only = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        assert stream == STREAM and how == only and count == len(nodes)
        self.last = list(nodes)
        return (_OK,)

    def cuGraphRemoveDependencies(self, graph: str, froms: Any, tos: Any, _: Any, count: int) -> Any:
        assert count == len(froms) == len(tos)
        for behind, node in zip(froms, tos, strict=True):
            self.edges[node].remove(behind)
        return (_OK,)

    def cuGraphAddDependencies(self, graph: str, froms: Any, tos: Any, _: Any, count: int) -> Any:
        assert count == len(froms) == len(tos)
        for behind, node in zip(froms, tos, strict=True):
            self.edges[node].append(behind)
        return (_OK,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(monkeypatch)

    def noted(name: str) -> Any:
        return lambda *args: [made.on_streams.append((name, *args)), made.result][1]

    library = SimpleNamespace(cuEventRecord=noted("record"), cuStreamWaitEvent=noted("wait"))
    monkeypatch.setattr(graph_event, "_library", lambda: library)
    return made


def test_on_streams(gpu: Driver) -> None:
    event = GraphEvent()
    event.record(STREAM)
    event.wait(8)
    assert gpu.on_streams == [("record", EVENT, STREAM), ("wait", 8, EVENT, 0)]
    gpu.result = int(driver.CUresult.CUDA_ERROR_INVALID_HANDLE)
    for call in (event.record, event.wait):
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_HANDLE: said"):
            call(STREAM)
    assert not gpu.edges


def test_what_follows_in_a_graph_waits(gpu: Driver) -> None:
    event = GraphEvent()
    gpu.last = ["a", "b"]
    event.wait_in_graph(STREAM)
    assert gpu.edges == {"wait 0": ["a", "b"]}
    assert gpu.last == ["wait 0"], "what follows does not wait for it"


def test_one_node_records_and_moves_behind_what_is_captured_since(gpu: Driver) -> None:
    event = GraphEvent()
    gpu.last = ["a"]
    node = event.record_in_graph(STREAM)
    assert gpu.edges == {"record 0": ["a"]} and gpu.last == ["a"], "nothing waits for a record"
    for last in (["b", "c"], ["d"]):
        gpu.last = last
        node = event.record_in_graph(STREAM, node)
        assert gpu.edges == {"record 0": last}
    assert not gpu.on_streams
