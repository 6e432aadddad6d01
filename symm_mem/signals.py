"""Signals between ranks: words that count, one writer each, in the order of the current stream.

A pad holds ``[CHANNELS][world_size]`` words for each rank. ``put(peer, c)`` writes my next count into word
``[c][me]`` of the peer's pad, after everything I stored before. ``wait(peer, c)`` waits until word ``[c][peer]`` of
my pad has reached my next count: the n-th wait matches the n-th put, and puts may run ahead.

On CPU ranks a wait spins. On CUDA put and wait are stream memory operations: the host does not wait, the stream does
(stream_watchdog.py bounds that). A wait that expires breaks the group on this rank, as one in a workspace does
(fault.py): no more calls until a reset, and kernels after it in the stream send nothing. So does any other exception
inside a call (Ctrl-C): counts that have advanced on one side alone would match puts with the wrong waits. A put after
an expired wait in a stream is made all the same. docs/protocol.md#signals

After these words come as many for users' own kernels. weft zeroes them, also at a reset, and does not use them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from .call_site import call_site, text
from .errors import PeerWait, WeftError
from .failure.fault import fault_of
from .failure.stream_watchdog import stream_watchdog_of
from .timeouts import get_timeout

if TYPE_CHECKING:
    from .heap.heap import Block

CHANNELS = 16


class Pad:
    """The signal words at the start of one block on every rank. It does not keep the block."""

    def __init__(self, block: Block) -> None:
        self._heap, self._offset = block.heap, block.offset
        self._fault = fault_of(self._heap)
        self._watch = stream_watchdog_of(self._heap)
        self.reset_state()
        self._heap.users.add(self)

    def reset_state(self) -> None:
        """Count from 0 again: the heap is being reset."""
        size = self._heap.world_size
        self._puts = [[0] * size for _ in range(CHANNELS)]
        self._waits = [[0] * size for _ in range(CHANNELS)]

    @staticmethod
    def bytes(world_size: int) -> int:
        return -(-2 * CHANNELS * world_size * 4 // 256) * 256

    def of_kernels(self, owner: int) -> int:
        """The address of a rank's words for users' own kernels, ``[CHANNELS][world_size]``."""
        return self._word(owner, CHANNELS, 0)

    def _word(self, owner: int, channel: int, writer: int) -> int:
        heap = self._heap
        return heap.address(owner) + self._offset + 4 * (channel * heap.world_size + writer)

    def _check(self, peer: int, channel: int) -> None:
        if not (isinstance(peer, int) and 0 <= peer < self._heap.world_size):
            raise ValueError(f"peer: is {peer!r}, must be a rank from 0 to {self._heap.world_size - 1}")
        if not (isinstance(channel, int) and 0 <= channel < CHANNELS):
            raise ValueError(f"channel: is {channel!r}, must be from 0 to {CHANNELS - 1}")
        if self._watch is not None and torch.cuda.is_current_stream_capturing():
            raise WeftError("signals count on the host and cannot be captured; weft's ops can")

    def put(self, peer: int, channel: int) -> None:
        self._check(peer, channel)
        with self._fault.whole("put"):
            self._put(peer, channel)

    def wait(self, peer: int, channel: int) -> None:
        self._check(peer, channel)
        with self._fault.whole("wait"):
            self._wait(peer, channel, "wait")

    def barrier(self, channel: int) -> None:
        rank, size = self._heap.rank, self._heap.world_size
        self._check(rank, channel)
        others = [(rank + step) % size for step in range(1, size)]
        with self._fault.whole("barrier"):
            for peer in others:
                self._put(peer, channel)
            for peer in others:
                self._wait(peer, channel, "barrier")

    def _put(self, peer: int, channel: int) -> None:
        self._puts[channel][peer] += 1
        count = self._puts[channel][peer] & 0xFFFFFFFF
        address = self._word(peer, channel, self._heap.rank)
        if self._watch is None:
            ctypes.c_uint32.from_address(address).value = count
        else:
            self._watch.write(address, count)

    def _wait(self, peer: int, channel: int, op: str) -> None:
        heap = self._heap
        self._waits[channel][peer] += 1
        count = self._waits[channel][peer] & 0xFFFFFFFF
        address = self._word(heap.rank, channel, peer)
        wait = PeerWait(op, heap.group_name, heap.rank, peer, f"channel {channel}", count, text(call_site()))
        if self._watch is None:
            self._fault.wait_until(address, count, peer, lambda _: wait)
        else:
            self._watch.wait(address, count, get_timeout(heap.group_name), self._fault, wait)
