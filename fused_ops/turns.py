"""Calls that one thread makes on several streams of a GPU take turns there, in the order in which they were made.

A kernel of weft keeps its multiprocessors while it waits for a peer. Say rank 0 runs a call of stream 1 on all of them
and rank 1 a call of stream 2: neither finds room for the call that the other one waits for, nor for a product in front
of it. So a call of another stream than the thread's last one begins, on the GPU, when that one has ended. It is what
collectives of a ProcessGroup do, which share one stream; whatever else lies on the streams runs when it may.

It follows that ranks must make their calls in one order, also those of several groups. Not in turn are

- calls of different threads, whose order nobody knows;
- replays of graphs, which weft does not see. Calls inside one graph are, as they were captured;
- all calls where WEFT_RESERVED_SMS leaves each so few multiprocessors that two find room at once.

As long as all calls of a process come from one stream, nothing is put on it for that, and a finding (again.py) says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch

from ..symm_mem.findings import changed
from .plan import num_sms, on

#: What a call does on its stream in front of its launches, or behind them; None: nothing.
Step: TypeAlias = Callable[[int], None] | None

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


def _graph_of(stream: int) -> int:
    from cuda.bindings import driver

    from ..symm_mem.backends.vmm import check

    status, graph = check(driver.cuStreamGetCaptureInfo(stream))[:2]
    if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return int(graph)
    return 0 if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE else _FAILED


class _Last:
    """Where a thread's last call ended."""

    def __init__(self) -> None:
        self.stream: int | None = None
        self.graph = 0
        self._event = torch.cuda.Event()

    def put(self, stream: int) -> None:
        """Behind all that lies on ``stream`` now."""
        self._event.record(_streams(stream, torch.cuda.current_device()))
        self.stream = stream

    def wait(self, stream: int) -> None:
        """Nothing more on ``stream`` until that has ended."""
        self._event.wait(_streams(stream, torch.cuda.current_device()))


@lru_cache(maxsize=256)
def _streams(stream: int, device: int) -> torch.cuda.Stream:
    # Not by ExternalStream: of the default stream, whose address is 0, it makes another one.
    return torch.cuda.get_stream_from_external(stream, device)


class _Mine(threading.local):
    """A thread's part."""

    def __init__(self) -> None:
        self.eager, self.captured = _Last(), _Last()
        self.on_first = False  # it has made a call on the stream that was the only one then


class Turns:
    """Those of one GPU, while it is the current device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: int | None = None  # the stream of all calls, unless there are several
        self._several = False
        self._mine = _Mine()

    def steps(self, stream: int) -> tuple[Step, Step]:
        """In front of and behind the launches of calls on ``stream``, until ``changed``."""
        with self._lock:
            if self._first is None:
                self._first = stream
            if self._first != stream and not self._several:
                self._several = True
                changed()
            return (self.begin, self.end) if self._several else (self.alone, None)

    def alone(self, stream: int) -> None:
        """A call on the only stream so far. Each thread says it for itself: findings are those of all."""
        self._mine.on_first = True

    def begin(self, stream: int) -> None:
        """What is launched on ``stream`` from here on comes behind the thread's last call."""
        last, first = self._mine.eager, self._first
        unmarked = last.stream is None and self._mine.on_first
        # Nothing was put behind the last call while there was one stream. If that is being captured now, nothing of it
        # runs; and a wait for it would capture this stream, too.
        if unmarked and first is not None and first != stream and not _graph_of(first):
            last.put(first)
        if last.stream is not None and last.stream != stream:
            last.wait(stream)

    def end(self, stream: int) -> None:
        """The call is launched."""
        self._mine.eager.put(stream)

    @contextmanager
    def captured(self, stream: int, graph: int) -> Iterator[None]:
        """The body's launches come behind those of the thread's last call in the same graph."""
        last = self._mine.captured
        if last.graph == graph and last.stream != stream:
            last.wait(stream)
        yield
        last.put(stream)
        last.graph = graph


_turns: dict[int, Turns | None] = {}


def _turns_of(index: int) -> Turns | None:
    if index not in _turns:
        device = torch.device("cuda", index)
        there = torch.cuda.get_device_properties(device).multi_processor_count
        # Threads may come here at once: all take the first one's.
        _turns.setdefault(index, None if 2 * num_sms(device) <= there else Turns())
    return _turns[index]


def steps_on(index: int, stream: int) -> tuple[Step, Step]:
    """For a finding: in front of and behind its launches, on a CUDA device."""
    turns = _turns_of(index)
    return (None, None) if turns is None else turns.steps(stream)


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Makes a CUDA device the current one; the body is a call on its current stream.

    Raises:
        RuntimeError: that is being captured, and the capture has failed.
    """
    with on(device):
        turns, (stream, graph) = _turns_of(device.index), stream_and_graph(device)
        if turns is not None and graph:
            with turns.captured(stream, graph):
                yield
            return
        before, behind = steps_on(device.index, stream)
        if before is not None:
            before(stream)
        yield
        if behind is not None:
            behind(stream)
