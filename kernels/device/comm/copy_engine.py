"""Pushes rows into the peers' buffers by the GPU's copy engines, on a stream of their own: no SM takes part.

    with engine.pushing(buffer, shard, chunk_rows, timeout_ns):
        ...  # kernels that wait for the peers' chunks, on the current stream

Who writes: rank r's engine copies chunk c of its shard into slot r of every peer's buffer ``[W, m, K]``, then
EPOCH_TICKET, the epoch, into flag c of rank r there; the stream keeps that order. The copy reads EPOCH_TICKET when it
runs: graph-safe.
Peers are served in the order rank-1, rank-2, ...: no link carries two shards at a time. Who waits: the acquire kernel
(acquire.cu), on the current stream in front of the kernels: beside them it might find no SM free.

Copies that are enqueued cannot be called off, so nothing but copies goes into a workspace whose buffers copy engines
write (abort_notice.cuh). docs/protocol.md#copy-engines-and-the-acquire-kernel has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ....symm_mem.backends import cuda_state
from ....symm_mem.layout import Layout
from ....symm_mem.workspace import Workspace
from .acquire import acquire_buffer


class CopyEngine:
    """The copy stream of one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        state, device = cuda_state.state, workspace.heap.device
        self._device = device.index
        self._handle = state.own_stream(self, device)
        self._stream = state.stream(self._handle, self._device)
        self._begin, self._end = state.event(), state.event()

    @contextmanager
    def pushing(self, buffer: int, shard: torch.Tensor, chunk_rows: int, timeout_ns: int) -> Iterator[None]:
        """Send ``shard`` [m, K], contiguous, to every peer while the kernels run that the body launches on the current
        stream.

        Behind the body the current stream waits for the copies: the shard may be overwritten then.
        """
        state = cuda_state.state
        handle: int = state.current_stream(self._device)
        current = state.stream(handle, self._device)
        acquire_buffer(self.workspace, buffer, timeout_ns, handle)
        self._begin.record(current)
        self._stream.wait_event(self._begin)
        self._push(buffer, shard, chunk_rows)
        self._end.record(self._stream)
        try:
            yield
        finally:
            current.wait_event(self._end)

    def _push(self, buffer: int, shard: torch.Tensor, chunk_rows: int) -> None:
        w, stream, rows, copy = self.workspace, self._handle, shard.shape[0], cuda_state.state.copy
        row_bytes = shard.shape[1] * shard.element_size()
        source, ticket = shard.data_ptr(), w.address + 4 * (Layout.EPOCH_TICKET + buffer)
        slot = w.address + w.layout.buffer(buffer) + w.rank * rows * row_bytes
        flag = w.address + 4 * (w.layout.flags(buffer) + w.rank * w.layout.flags_per_rank)
        for step in range(1, w.world_size):
            there = ((w.rank - step) % w.world_size - w.rank) * w.span
            for chunk, row in enumerate(range(0, rows, chunk_rows)):
                at, size = row * row_bytes, min(chunk_rows, rows - row) * row_bytes
                copy(slot + there + at, source + at, size, stream)
                copy(flag + there + 4 * chunk, ticket, 4, stream)
