"""An event that is recorded and waited for both on streams and by CUDA graphs.

A node of a graph that waits for an event waits for what preceded the event when the graph was launched; a node that
records it counts as a record made at that launch. So with one event the replays of graphs, which nobody in Python
sees, and work on streams come one after the other, in the order in which the host launched them.

An event is not destroyed, as a graph may hold it that outlives its owner.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from cuda.bindings import driver

from .vmm import check_driver


@cache
def _library() -> ctypes.CDLL:
    """The driver itself: on streams events are recorded at each call, and the bindings take four times as long."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    return library


class RecordNode(NamedTuple):
    """A node of a graph that records an event, and the nodes that it depends on."""

    node: Any
    dependencies: list[Any]


class GraphEvent:
    """On the current device, after nothing yet. A stream is a CUstream as an integer."""

    def __init__(self) -> None:
        self._event = check_driver(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._handle = int(self._event)

    def record(self, stream: int) -> None:
        """Record it after what is on ``stream``, which is not being captured."""
        _check(_library().cuEventRecord(self._handle, stream))

    def wait(self, stream: int) -> None:
        """Nothing more on ``stream``, which is not being captured, until all that precedes it has ended."""
        _check(_library().cuStreamWaitEvent(stream, self._handle, 0))

    def wait_in_graph(self, stream: int) -> None:
        """Likewise at each replay of the graph that ``stream`` is being captured into."""
        graph, last = _captured(stream)
        node = check_driver(driver.cuGraphAddEventWaitNode(graph, last, len(last), self._event))
        only = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        check_driver(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, only))

    def record_in_graph(self, stream: int, node: RecordNode | None = None) -> RecordNode:
        """At each replay it comes after what has been captured on ``stream`` so far, and nothing waits for that.

        Args:
            node: what was returned for the same graph last, whose work what has been captured since comes after. It
                moves: each node, and each edge, would take a replay a microsecond of the host.
        """
        graph, last = _captured(stream)
        if node is None:
            made = check_driver(driver.cuGraphAddEventRecordNode(graph, last, len(last), self._event))
            return RecordNode(made, last)
        for change, nodes in (
            (driver.cuGraphRemoveDependencies, node.dependencies),
            (driver.cuGraphAddDependencies, last),
        ):
            check_driver(change(graph, nodes, [node.node] * len(nodes), None, len(nodes)))
        return RecordNode(node.node, last)


def _captured(stream: int) -> tuple[Any, list[Any]]:
    """The graph that ``stream`` is being captured into, and what the next node there comes after."""
    said = check_driver(driver.cuStreamGetCaptureInfo(stream))
    return said[2], list(said[3])


def _check(result: int) -> None:
    if result:
        check_driver((driver.CUresult(result),))
