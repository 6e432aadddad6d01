"""Stream order: calls that one thread makes on several streams of a GPU run one after the other, in call order.

A kernel of weft keeps its SMs while it waits for a peer. Say rank 0 runs a call of stream 1 on all of them and rank 1 a
call of stream 2: neither has room for the call that the other one waits for, nor for a matmul before it. So a call
on another stream than the thread's last one begins, on the GPU, when that one has ended. Collectives of a ProcessGroup
do the same, as they share one stream; other work on the streams is not ordered.

Calls inside a graph are ordered as they were captured. Its replays weft does not see, nor on which stream they are. So
the graph itself waits for the last call of the thread that captures it, or for the last graph with such calls, in front
of its first one, and what comes next waits for its last one (``GraphEvent``). While there is such a graph, each eager
call begins with a wait and ends with an event, whatever its stream is.

It follows that ranks must make their calls in one order, also those of several groups. Not ordered are

- calls of different threads, whose order nobody knows. A graph counts as a call of the thread that captured it;
- calls of two streams where WEFT_RESERVED_SMS leaves each so few SMs that two fit at once, and replays beside them; of
  three where three fit. With one stream more, all calls are ordered, and no replay.

As long as the calls of a process come from so few streams, one if nothing is reserved, and no graph was captured,
nothing is enqueued for that, and a cached call (launch_cache.py) says so. A stream from which no call has come for a
while, such as that of a warm-up, is forgotten; so is a graph that is gone.

torch's own streams live as long as the process. An external one (torch.cuda.ExternalStream) may be destroyed at any
moment, and its handle then be another stream's. So no external stream is touched after its call, the event is put
there at once; no handle of one is compared; and what is kept for one is kept by its id, which is no other stream's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from ...symm_mem import flight_recorder, forks, is_checked
from ...symm_mem.backends import cuda_state
from ...symm_mem.call_cache import invalidate_calls
from ...symm_mem.heap.captured import CapturedGraph
from .call_lines import FAILED, CallLine, GraphLine, graph_of
from .plan import num_sms, on

#: What a call does on its stream before its launches, or after them; None: nothing.
StreamStep: TypeAlias = Callable[[int], None] | None

# SMs on which no call may count: clusters do not fit into all of a GPU at once.
_SPARE = 4
_WINDOW = 1000  # calls, after which a stream without one is forgotten


def stream_and_graph(device: torch.device) -> tuple[int, int]:
    """The current stream of a CUDA device, and the graph it is being captured into (0: none).

    Raises:
        RuntimeError: that capture has failed. Nothing can be launched there, and nothing is begun that peers wait for.
    """
    cuda = cuda_state.state
    stream: int = cuda.current_stream(device.index)
    if not cuda.is_capturing():
        return stream, 0
    graph = graph_of(stream)
    if graph == FAILED:
        raise RuntimeError(
            "the current stream is being captured into a CUDA graph, and that has failed before"
        )
    return stream, graph


def stream_on(device: int) -> int | None:
    """The current stream on a CUDA device, and 0 between CPU ranks (-1); None where a call must take the slow path.

    In a forked child, too: the slow path refuses it, where a question to CUDA would end in the driver's words. A call
    between CPU ranks that is recorded or compared is so on the slow path, which is also below autocast.
    """
    cuda = cuda_state.state
    if device < 0:
        told = flight_recorder.calls is not None or is_checked() or torch.is_autocast_enabled("cpu")
        return None if told or forks.inherited else 0
    if forks.inherited or cuda.current_device() != device or cuda.is_capturing():
        return None
    stream: int = cuda.current_stream(device)
    return stream


def is_external(stream: int, device: int) -> bool:
    """Whether the current stream of a CUDA device, ``stream``, is not one of torch's own."""
    return stream != 0 and cuda_state.state.stream_number(device) == stream


def stream_key(stream: int, device: int) -> int | tuple[int, int]:
    """What is kept for the current stream of a CUDA device, ``stream``, is kept by this: of an external one its handle,
    and its id.

    Ranks must find the same: the handle of a stream that is gone may be given to a new one on one of them alone.
    """
    if not is_external(stream, device):
        return stream
    return stream, cuda_state.state.stream_id(stream)


class _Mine(threading.local):
    """A thread's part."""

    def __init__(self) -> None:
        self.eager, self.captured, self.replays = CallLine(), CallLine(), GraphLine()


class StreamOrder:
    """The order of one GPU's calls, while it is the current device.

    Args:
        room: how many calls fit at once, whatever they are.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._lock = threading.Lock()
        self._streams: set[int] = set()  # of all calls, as long as there is room for all of them at once
        self._several = False
        # While there are several: when each was called last, counted in calls. Of threads that count at once, one may
        # be missed.
        self._seen: dict[int, int] = {}
        self._calls = self._looked = 0
        self._graphs: list[CapturedGraph] = []  # with calls, while nothing is reserved for their replays
        self._mine = _Mine()

    def steps(self, stream: int, *, external: bool = False) -> tuple[StreamStep, StreamStep]:
        """Before and after the launches of calls on ``stream``, until ``invalidate_calls``."""
        if self._graphs:
            return self._begin_beside_graphs, self._end_beside_graphs
        if external:
            return self._behind_last, self._end_external
        with self._lock:
            if not self._several:
                self._streams.add(stream)
                if len(self._streams) > self.room:
                    self._several, self._seen, self._looked = True, {}, self._calls
                    invalidate_calls()
            return (self.begin, self.end) if self._several else (self.alone, None)

    def alone(self, stream: int) -> None:
        """A call for which there is room. Each thread notes its own: cached calls are those of all."""
        mine = self._mine
        line = mine.eager
        if mine.replays.used:
            mine.replays.leave(stream)
        if line.last is not None or stream not in line.streams:
            line.alone(stream, self.room)

    def _behind_last(self, stream: int) -> None:
        """What is launched on ``stream`` from here on comes after the thread's last call."""
        mine = self._mine
        if mine.replays.used:
            mine.replays.leave(stream)
        mine.eager.wait(stream)

    def begin(self, stream: int) -> None:
        """The same, and the stream was called now."""
        self._behind_last(stream)
        self._calls = self._seen[stream] = self._calls + 1
        if self._calls - self._looked >= _WINDOW:
            self._forget()

    def _forget(self) -> None:
        """Streams without a call for a while. What still lies there each thread's line knows."""
        with self._lock:
            since, self._looked = self._looked, self._calls
            self._seen = {stream: at for stream, at in list(self._seen.items()) if at > since}
            if self._several and len(self._seen) <= self.room:
                self._streams, self._several = set(self._seen), False
                invalidate_calls()

    def end(self, stream: int) -> None:
        """The call is launched."""
        self._mine.eager.end(stream)

    def _end_external(self, stream: int) -> None:
        self._mine.eager.end(stream, external=True)

    def _begin_beside_graphs(self, stream: int) -> None:
        mine = self._mine
        if mine.replays.wait(stream):
            mine.eager.wait(stream)
            mine.eager.begins()
        self._calls += 1
        if self._calls - self._looked >= _WINDOW:
            self._looked = self._calls
            self._forget_graphs()

    def _end_beside_graphs(self, stream: int) -> None:
        self._mine.replays.end(stream)

    def _forget_graphs(self, captured: CapturedGraph | None = None) -> None:
        """Those that are gone, and take note of another one."""
        with self._lock:
            before = bool(self._graphs)
            self._graphs = [graph for graph in self._graphs if not graph.is_gone()]
            if captured is not None:
                self._graphs.append(captured)
            if bool(self._graphs) != before:
                invalidate_calls()

    @contextmanager
    def captured(self, stream: int, graph: int) -> Iterator[None]:
        """The body's launches come after those of the thread's last call in the same graph; if nothing is reserved
        for replays, in each after the thread's last call or graph."""
        mine, ordered = self._mine, self.room == 1
        line = mine.captured
        if line.graph != graph:
            if ordered:
                mine.replays.enter_graph(stream)
                self._forget_graphs(CapturedGraph(stream))
            line.begins(graph, several=ordered)  # there an event costs nothing
        line.several = line.several or len(line.streams | {stream}) > self.room
        if line.several:
            line.wait(stream)
        yield
        if line.several:
            line.end(stream)
        else:
            line.streams.add(stream)
        if ordered:
            mine.replays.end_in_graph(stream)


def order_of(index: int) -> StreamOrder:
    """Of a CUDA device's calls."""
    orders: dict[int, StreamOrder] = cuda_state.state.orders
    if index not in orders:
        device = torch.device("cuda", index)
        room = max(1, (cuda_state.state.num_sms(device) - _SPARE) // num_sms(device))
        orders.setdefault(index, StreamOrder(room))  # threads may come here at once: all take one
    return orders[index]


def steps_on(index: int, stream: int) -> tuple[StreamStep, StreamStep]:
    """Before and after the launches of calls on the current stream of a CUDA device."""
    return order_of(index).steps(stream, external=is_external(stream, index))


@contextmanager
def in_stream_order(device: torch.device) -> Iterator[None]:
    """Makes a CUDA device the current one; the body is a call on its current stream.

    Raises:
        RuntimeError: that is being captured, and the capture has failed.
    """
    with on(device):
        stream, graph = stream_and_graph(device)
        if graph:
            with order_of(device.index).captured(stream, graph):
                yield
            return
        before, after = steps_on(device.index, stream)
        if before is not None:
            before(stream)
        yield
        if after is not None:
            after(stream)
