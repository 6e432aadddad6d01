"""What keeps one thread's calls on a GPU in line: events between streams, and those that graphs share with streams."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ...symm_mem.backends import cuda_state

_EXTERNAL = -1  # instead of a stream: equal to none
FAILED = -1  # instead of a graph: a capture that has failed, and has not ended


def graph_of(stream: int) -> int:
    """The graph that a stream is being captured into (0: none)."""
    status, graph = cuda_state.state.capture_of(stream)
    return graph if status == "ACTIVE" else 0 if status == "NONE" else FAILED


class CallLine:
    """Calls that run one after the other: a thread's, the eager ones or those in one graph."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self.begins()

    def begins(self, graph: int = 0, *, several: bool = False) -> None:
        """No call yet."""
        self.graph = graph
        self.several = several  # of a graph: its calls are ordered
        #: Of calls that were made while there was room for all, with no event after them.
        self.streams: set[int] = set()
        self.last: int | None = None  #: stream on which the last call ended, if the event is after it

    def wait(self, stream: int) -> None:
        """Nothing more on ``stream`` until the last calls have ended."""
        if self.last is not None and self.last != stream:
            self._put_in_front(stream)
        for other in self.streams - {stream}:
            # If it is being captured now, nothing of it runs; and a wait for it would capture this stream, too.
            if graph_of(other) == self.graph:
                self._put_behind(other)
                self._put_in_front(stream)

    def alone(self, stream: int, room: int) -> None:
        """A call on ``stream`` with nothing put after. What streams hold that have been forgotten comes before it.

        Nothing happens where ``last`` is None and the stream is one of ``streams``, as at nearly every call.
        """
        if self.last is not None or (stream not in self.streams and len(self.streams) >= room):
            self.wait(stream)
            self.last = None
            self.streams.clear()
        self.streams.add(stream)

    def end(self, stream: int, *, external: bool = False) -> None:
        """The last call is the last work on ``stream`` now."""
        self._put_behind(stream)
        if external:
            self.last = _EXTERNAL
        self.streams.clear()

    def _put_behind(self, stream: int) -> None:
        if self._event is None:
            self._event = cuda_state.state.event()
        self._event.record(_as_object(stream))
        self.last = stream

    def _put_in_front(self, stream: int) -> None:
        assert self._event is not None
        self._event.wait(_as_object(stream))


def _as_object(stream: int) -> torch.cuda.Stream:
    cuda = cuda_state.state
    return cuda.stream(stream, cuda.current_device())


class GraphLine:
    """The order of a thread's eager calls and of the replays of graphs that it has captured."""

    def __init__(self) -> None:
        self._node: Any = None  # the RecordNode of the graph that is being captured
        self.used = False  #: by eager calls, since the last one that went without the event

    @cached_property
    def _event(self) -> Any:
        """A ``GraphEvent``, made on the device of the first call that needs it."""
        return cuda_state.state.graph_event()

    def wait(self, stream: int) -> bool:
        """Nothing more on ``stream`` until the last call and the last graph have ended. Whether it is the first such
        call, and what went before it without the event is yet to be waited for."""
        self._event.wait(stream)
        first, self.used = not self.used, True
        return first

    def end(self, stream: int) -> None:
        """The last call is the last work on ``stream`` now."""
        self._event.record(stream)

    def leave(self, stream: int) -> None:
        """No graph is left: a call on ``stream`` comes after those that used the event."""
        self.used = False
        self._event.wait(stream)

    def enter_graph(self, stream: int) -> None:
        """Before the first call in a graph."""
        self._event.wait_in_graph(stream)
        self._node = None

    def end_in_graph(self, stream: int) -> None:
        """After each call in it."""
        self._node = self._event.record_in_graph(stream, self._node)
