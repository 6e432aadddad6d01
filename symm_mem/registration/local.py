"""The segments of this rank's own tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..bootstrap.fd_exchange import close_fds
from ..heap.heap import heap_of
from .segments import Mapping, Place, Segment, SegmentTable, extent, name_of_dtype

if TYPE_CHECKING:
    from ..heap.heap import Heap


@dataclass
class Described:
    """A segment, and the descriptors by which peers open it, which are the holder's to close.

    ``keep``: what must live as long as the segment is in use.
    """

    segment: Segment
    fds: list[int]
    keep: object = None


class RegisteredBatch:
    """The tensors of one call, and the segments in which they lie."""

    def __init__(self) -> None:
        self.segments: list[Described] = []
        self.places: list[Place] = []

    def add(self, tensor: torch.Tensor, described: Described) -> None:
        keys = [known.segment.key for known in self.segments]
        if described.segment.key in keys:
            close_fds(described.fds)
        else:
            keys.append(described.segment.key)
            self.segments.append(described)
        at = keys.index(described.segment.key)
        offset = tensor.data_ptr() - described.segment.base if tensor.numel() else 0
        place = at, offset, tuple(tensor.shape), tensor.stride(), name_of_dtype(tensor.dtype)
        self.places.append(Place(*place))

    def close(self) -> None:
        for described in self.segments:
            close_fds(described.fds)
            described.fds = []


class OwnSegments:
    """What the tensors of one rank lie in; a file next to this one for each device.

    Attributes:
        outlives_peers: memory must be there until the peers have unmapped it.
    """

    outlives_peers = False

    def __init__(self, heap: Heap, table: SegmentTable) -> None:
        self.heap, self.table, self.rank = heap, table, heap.rank
        self.names = itertools.count()

    def describe(self, tensors: list[torch.Tensor], batch: RegisteredBatch) -> None:
        """Where the tensors lie, into ``batch``.

        Raises:
            OSError, RuntimeError: memory of this kind cannot be a peer's, and why.
        """
        for tensor in tensors:
            batch.add(tensor, self._segment_of(tensor, batch))

    def _segment_of(self, tensor: torch.Tensor, batch: RegisteredBatch) -> Described:
        address = tensor.data_ptr()
        size = extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
        block = heap_of(tensor)
        if not tensor.numel() or (block is not None and block.heap is self.heap):
            return Described(Segment("heap", "", self.heap.address(self.rank), self.heap.capacity), [])
        for known in batch.segments:
            if known.segment.kind != "heap" and known.segment.holds(address, size):
                return Described(known.segment, [])
        return self.outside_the_heap(tensor, size)

    def outside_the_heap(self, tensor: torch.Tensor, size: int) -> Described:
        """The segment of a tensor that takes ``size`` bytes from its first one on."""
        raise NotImplementedError

    def open(self, rank: int, segment: Segment, fds: list[int]) -> Mapping:
        """Map a segment of a peer. ``fds``: as many as it has parts; they stay the caller's.

        Raises:
            OSError, RuntimeError, ValueError: it cannot be mapped here, or is not what the peer says.
        """
        if segment.kind != "heap":
            return self.open_outside_the_heap(rank, segment, fds)
        if segment.size > (here := self.heap.capacity):
            raise ValueError(f"rank {rank} has posted a heap of {segment.size} bytes, here it has {here}")
        return Mapping(self.heap.address(rank), self.heap)

    def open_outside_the_heap(self, rank: int, segment: Segment, fds: list[int]) -> Mapping:
        raise NotImplementedError
