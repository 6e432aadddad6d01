"""Stream order: calls that one thread makes on several streams of a GPU run one after the other, in call order.

A kernel of weft keeps its SMs while it waits for a peer. Say rank 0 runs a call of stream 1 on all of them and rank 1 a
call of stream 2: neither has room for the call that the other one waits for, nor for a matmul in front of it. So a call
on another stream than the thread's last one begins, on the GPU, when that one has ended. Collectives of a ProcessGroup
do the same, as they share one stream; other work on the streams is not ordered.

It follows that ranks must make their calls in one order, also those of several groups. Not ordered are

- calls of different threads, whose order nobody knows;
- replays of graphs, which weft does not see. Calls inside one graph are ordered, as they were captured;
- calls of two streams where WEFT_RESERVED_SMS leaves each so few SMs that two fit at once; of three where three fit.
  With one stream more, all are ordered.

As long as the calls of a process come from so few streams, one if nothing is reserved, nothing is enqueued for that,
and a cached call (fast_path.py) says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch

from ...symm_mem import forks
from ...symm_mem.call_cache import invalidate_calls
from .plan import num_sms, on

#: What a call does on its stream in front of its launches, or behind them; None: nothing.
StreamStep: TypeAlias = Callable[[int], None] | None

# SMs on which no call may count: clusters do not fit into all of a GPU at once.
_SPARE = 4
_FAILED = -1  # instead of a graph: a capture that has failed, and has not ended


def stream_and_graph(device: torch.device) -> tuple[int, int]:
    """The current stream of a CUDA device, and the graph it is being captured into (0: none).

    Raises:
        RuntimeError: that capture has failed. Nothing can be launched there, and nothing is begun that peers wait for.
    """
    # As torch.cuda says it, without the objects that it makes: this is asked at every call.
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    if not torch._C._cuda_isCurrentStreamCapturing():
        return stream, 0
    graph = _graph_of(stream)
    if graph == _FAILED:
        raise RuntimeError(
            "the current stream is being captured into a CUDA graph, and that has failed before"
        )
    return stream, graph


def stream_on(device: int) -> int | None:
    """The current stream on a CUDA device; None where a call must take the slow path, as one on the CPU (-1).

    In a forked child, too: the slow path refuses it, where a question to CUDA would end in the driver's words.
    """
    if (
        device < 0
        or forks.inherited
        or torch._C._cuda_getDevice() != device
        or torch._C._cuda_isCurrentStreamCapturing()
    ):
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def _graph_of(stream: int) -> int:
    from cuda.bindings import driver

    from ...symm_mem.backends.vmm import check_driver

    status, graph = check_driver(driver.cuStreamGetCaptureInfo(stream))[:2]
    if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return int(graph)
    return 0 if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE else _FAILED


class _Line:
    """A thread's calls, the eager ones or those in one graph."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self.begins()

    def begins(self, graph: int = 0, *, several: bool = False) -> None:
        """No call yet."""
        self.graph = graph
        self.several = several  # of a graph: its calls are ordered
        #: Of calls that were made while there was room for all, with no event behind them.
        self.streams: set[int] = set()
        self._last: int | None = None  # stream on which the last call ended, if the event is behind it

    def wait(self, stream: int) -> None:
        """Nothing more on ``stream`` until the last calls have ended."""
        if self._last is not None and self._last != stream:
            self._put_in_front(stream)
        for other in self.streams - {stream}:
            # If it is being captured now, nothing of it runs; and a wait for it would capture this stream, too.
            if _graph_of(other) == self.graph:
                self._put_behind(other)
                self._put_in_front(stream)

    def end(self, stream: int) -> None:
        """The last call is the last work on ``stream`` now."""
        self._put_behind(stream)
        self.streams.clear()

    def _put_behind(self, stream: int) -> None:
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(_streams(stream, torch.cuda.current_device()))
        self._last = stream

    def _put_in_front(self, stream: int) -> None:
        assert self._event is not None
        self._event.wait(_streams(stream, torch.cuda.current_device()))


@lru_cache(maxsize=256)
def _streams(stream: int, device: int) -> torch.cuda.Stream:
    # The default stream's address is 0: for that ExternalStream takes another one, out of its pool.
    return torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)


class _Mine(threading.local):
    """A thread's part."""

    def __init__(self) -> None:
        self.eager, self.captured = _Line(), _Line()


class StreamOrder:
    """The order of one GPU's calls, while it is the current device.

    Args:
        room: how many calls fit at once, whatever they are.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._streams: set[int] = set()  # of all calls, as long as there is room for all of them at once
        self._several = False
        self._mine = _Mine()

    def steps(self, stream: int) -> tuple[StreamStep, StreamStep]:
        """In front of and behind the launches of calls on ``stream``, until ``invalidate_calls``."""
        with self._lock:
            if not self._several:
                self._streams.add(stream)
                if len(self._streams) > self._room:
                    self._several = True
                    invalidate_calls()
            return (self.begin, self.end) if self._several else (self.alone, None)

    def alone(self, stream: int) -> None:
        """A call for which there is room. Each thread notes its own: cached calls are those of all."""
        self._mine.eager.streams.add(stream)

    def begin(self, stream: int) -> None:
        """What is launched on ``stream`` from here on comes behind the thread's last call."""
        self._mine.eager.wait(stream)

    def end(self, stream: int) -> None:
        """The call is launched."""
        self._mine.eager.end(stream)

    @contextmanager
    def captured(self, stream: int, graph: int) -> Iterator[None]:
        """The body's launches come behind those of the thread's last call in the same graph."""
        line = self._mine.captured
        if line.graph != graph:
            line.begins(graph, several=self._room == 1)  # there an event costs nothing
        line.several = line.several or len(line.streams | {stream}) > self._room
        if line.several:
            line.wait(stream)
        yield
        if line.several:
            line.end(stream)
        else:
            line.streams.add(stream)


_turns: dict[int, StreamOrder] = {}


def _turns_of(index: int) -> StreamOrder:
    if index not in _turns:
        device = torch.device("cuda", index)
        there = torch.cuda.get_device_properties(device).multi_processor_count
        room = max(1, (there - _SPARE) // num_sms(device))
        _turns.setdefault(index, StreamOrder(room))  # threads may come here at once: all take one
    return _turns[index]


def steps_on(index: int, stream: int) -> tuple[StreamStep, StreamStep]:
    """For a cached call: in front of and behind its launches, on a CUDA device."""
    return _turns_of(index).steps(stream)


@contextmanager
def in_stream_order(device: torch.device) -> Iterator[None]:
    """Makes a CUDA device the current one; the body is a call on its current stream.

    Raises:
        RuntimeError: that is being captured, and the capture has failed.
    """
    with on(device):
        stream, graph = stream_and_graph(device)
        if graph:
            with _turns_of(device.index).captured(stream, graph):
                yield
            return
        before, behind = steps_on(device.index, stream)
        if before is not None:
            before(stream)
        yield
        if behind is not None:
            behind(stream)
