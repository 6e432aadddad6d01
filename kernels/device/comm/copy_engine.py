"""Pushes rows into the peers' buffers by the GPU's copy engines, on a stream of their own: no SM takes part.

    engine.start(buffer, of, timeout_ns)  # the pieces that `of` returns for each peer, after which anything may run
    engine.join(buffer)  # what was sent may be overwritten after this

Who writes: rank r's engine copies into every peer's buffer, then EPOCH_TICKET, the epoch, into flag 0 of rank r there;
the stream keeps that order. The copy reads EPOCH_TICKET when it runs: graph-safe.
Peers are served in the order rank-1, rank-2, ...: no link carries two shards at a time. Who waits: the acquire kernel
(acquire.cu), on the current stream before the kernels: while they run it might find no SM free.

Copies that are enqueued cannot be called off, so nothing but copies goes into a workspace whose buffers copy engines
write (abort_notice.cuh). docs/protocol.md#copy-engines-and-the-acquire-kernel has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from ....symm_mem.backends import cuda_state
from ....symm_mem.layout import NUM_BUFFERS, Layout
from ....symm_mem.workspace import Workspace
from . import acquire

#: Microseconds of a call without products and copies: the acquire kernel and the epoch's end; a wait for a peer; and
#: until the first bytes of a copy and the flag after its last are there.
CALL_US, PEER_US, STARTS_US = 10.0, 3.0, 12.0
_ENGINE = "copy engine"


@dataclass(frozen=True)
class CopiedConfig:
    """Copy engines send rows, of fp8 with scales, while torch's product multiplies: there is nothing to choose."""

    algorithm: ClassVar[str] = "copy_engine"


class CopiedPiece(NamedTuple):
    """``rows`` times ``size`` bytes that a rank gets one after the other, ``offset`` bytes into its buffer: the first
    at ``address``, each of the others ``step`` bytes after the one before."""

    address: int
    offset: int
    size: int
    rows: int = 1
    step: int = 0


class CopyEngine:
    """The copy stream of one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._device = workspace.heap.device.index
        self._handle = cuda_state.state.own_stream(self, workspace.heap.device)
        event = cuda_state.state.event
        # Of each buffer: its acquire kernel, and the events after that and after the pushes.
        self._buffers: list[tuple[acquire.StreamWait, torch.cuda.Event, torch.cuda.Event]] = [
            (acquire.StreamWait("acquire", workspace, i), event(), event()) for i in range(NUM_BUFFERS)
        ]
        self._made = event()

    @cached_property
    def _stream(self) -> Any:
        return cuda_state.state.stream(self._handle, self._device)

    def start(
        self,
        buffer: int,
        of: Callable[[int], Iterable[CopiedPiece]],
        timeout_ns: int,
        own: CopiedPiece | None = None,
    ) -> None:
        """Send each peer the pieces that ``of(peer)`` returns, while what follows runs on the current stream.

        They go into its buffer, then the epoch into flag 0 of this rank there. Until the current stream has passed a
        ``join`` they must not be overwritten. ``of`` may launch what makes one before it yields it, and then calls
        ``follow``.

        Args:
            own: what goes into this rank's own buffer, whole.
        """
        state = cuda_state.state
        kernel, begin, end = self._buffers[buffer]
        handle: int = state.current_stream(self._device)
        kernel.launch(timeout_ns, handle)
        begin.record(state.stream(handle, self._device))
        self._stream.wait_event(begin)
        self._send(buffer, of)
        if own is not None:
            place = self.workspace.address + self.workspace.layout.buffer(buffer) + own.offset
            state.copy(place, own.address, own.size, self._handle)
        end.record(self._stream)

    def follow(self) -> None:
        """Further copies come after what is on the current stream."""
        self._made.record(self._current())
        self._stream.wait_event(self._made)

    def join(self, buffer: int) -> None:
        """What follows on the current stream comes after the pushes."""
        self._current().wait_event(self._buffers[buffer][2])

    def _current(self) -> torch.cuda.Stream:
        state = cuda_state.state
        stream: torch.cuda.Stream = state.stream(state.current_stream(self._device), self._device)
        return stream

    def _send(self, buffer: int, of: Callable[[int], Iterable[CopiedPiece]]) -> None:
        """Each peer's pieces, and after them the epoch into flag 0 of this rank there."""
        w, stream, state = self.workspace, self._handle, cuda_state.state
        ticket = w.address + 4 * (Layout.EPOCH_TICKET + buffer)
        here = w.address + w.layout.buffer(buffer)
        flag = w.address + 4 * (w.layout.flags(buffer) + w.rank * w.layout.flags_per_rank)
        for distance in range(1, w.world_size):
            peer = (w.rank - distance) % w.world_size
            there = (peer - w.rank) * w.span
            for address, offset, size, rows, step in of(peer):
                if rows == 1:
                    state.copy(here + offset + there, address, size, stream)
                else:
                    state.copy_rows(here + offset + there, address, (rows, size), step, stream)
            state.copy(flag + there, ticket, 4, stream)


def engine_of(workspace: Workspace[Layout]) -> CopyEngine:
    """That of a workspace whose buffers copy engines write."""
    if _ENGINE not in workspace.copy_streams:
        workspace.copy_streams[_ENGINE] = CopyEngine(workspace)
    found: CopyEngine = workspace.copy_streams[_ENGINE]
    return found


class CopiedCall:
    """A call whose rows or products copy engines send beside torch's kernels: prepared once, called often.

    Args:
        workspace: with room for ``needed``; copy engines write its buffers.

    Raises:
        ValueError: the workspace is too small.
    """

    def __init__(self, workspace: Workspace[Layout], needed: Layout) -> None:
        if not workspace.layout.holds(needed):
            raise ValueError(f"workspace: is {workspace.layout}, must hold {needed}")
        self.workspace, self._engine = workspace, engine_of(workspace)
        size, buffers = workspace.world_size, range(NUM_BUFFERS)
        order = [(workspace.rank + step) % size for step in range(1, size)]
        # Of each buffer the waits for what the peers send, in the order in which that comes.
        self._arrivals = [
            [(src, acquire.StreamWait("arrive", workspace, i, src)) for src in order] for i in buffers
        ]
        self._ends = [acquire.end_epoch_launcher(workspace, i) for i in buffers]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """An exception inside breaks the group: the peers may wait for what was not launched."""
        try:
            with self.workspace.lock:
                yield
        except BaseException as e:
            self.workspace.abandon(e)
            raise
