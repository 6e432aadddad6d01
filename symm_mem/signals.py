"""Signals between ranks: words that count, one writer each, in the order of the current stream.

A pad holds ``[CHANNELS][world_size]`` words for each rank. ``put(peer, c)`` writes my next count into word
``[c][me]`` of the peer's pad, after everything I stored before. ``wait(peer, c)`` waits until word ``[c][peer]`` of
my pad has reached my next count: the n-th wait meets the n-th put, and puts may run ahead. Nothing is reset.

On CPU ranks a wait spins. On CUDA put and wait are stream memory operations: the host does not wait, the stream does.
A watcher thread bounds that: when a deadline passes it notes the PeerTimeout, which the next call raises, and
writes the awaited count itself, so that the stream goes on and the context stays usable.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

import torch

from .errors import PeerTimeout, WeftError
from .timeouts import get_timeout

if TYPE_CHECKING:
    from .heap import Block

# What PeerTimeout says of a wait, up to what was expected.
Awaited: TypeAlias = tuple[str, str, int, int, str, int]

CHANNELS = 16
_SPINS = 200  # tries before a waiting CPU rank offers its core to the others


def reached(seen: int, expected: int) -> bool:
    """Whether a 32-bit counter has come to ``expected``, also once it has wrapped around."""
    return (seen - expected) & 0xFFFFFFFF < 0x80000000


def spin(address: int, expected: int, timeout: float) -> int | None:
    """Wait until the word at a CPU address has reached ``expected``: None, or what was seen at the deadline."""
    word = ctypes.c_uint32.from_address(address)
    deadline = None
    while True:
        for _ in range(_SPINS):
            if reached(word.value, expected):
                return None
        os.sched_yield()
        now = time.monotonic()
        if deadline is None:
            deadline = now + timeout
        elif now > deadline:
            return word.value


class Pad:
    """The signal words at the start of one block on every rank. It does not keep the block."""

    def __init__(self, block: Block) -> None:
        self._heap, self._offset = block.heap, block.offset
        size = self._heap.world_size
        self._puts = [[0] * size for _ in range(CHANNELS)]
        self._waits = [[0] * size for _ in range(CHANNELS)]
        self._watch = _Watch(self._heap.device) if self._heap.device.type == "cuda" else None

    @staticmethod
    def bytes(world_size: int) -> int:
        return -(-CHANNELS * world_size * 4 // 256) * 256

    def _word(self, owner: int, channel: int, writer: int) -> int:
        heap = self._heap
        return heap.address(owner) + self._offset + 4 * (channel * heap.world_size + writer)

    def _check(self, peer: int, channel: int) -> None:
        if not (isinstance(peer, int) and 0 <= peer < self._heap.world_size):
            raise ValueError(f"peer: is {peer!r}, must be a rank from 0 to {self._heap.world_size - 1}")
        if not (isinstance(channel, int) and 0 <= channel < CHANNELS):
            raise ValueError(f"channel: is {channel!r}, must be from 0 to {CHANNELS - 1}")
        if self._watch is not None:
            if torch.cuda.is_current_stream_capturing():
                raise WeftError("signals count on the host and cannot be captured; weft's ops can")
            self._watch.raise_if_expired()

    def put(self, peer: int, channel: int) -> None:
        self._check(peer, channel)
        self._puts[channel][peer] += 1
        count = self._puts[channel][peer] & 0xFFFFFFFF
        address = self._word(peer, channel, self._heap.rank)
        if self._watch is None:
            ctypes.c_uint32.from_address(address).value = count
        else:
            self._watch.write(address, count)

    def wait(self, peer: int, channel: int, op: str) -> None:
        self._check(peer, channel)
        heap = self._heap
        self._waits[channel][peer] += 1
        count = self._waits[channel][peer] & 0xFFFFFFFF
        address = self._word(heap.rank, channel, peer)
        timeout = get_timeout(heap.group_name)
        error = (op, heap.group_name, heap.rank, peer, f"channel {channel}", count)
        if self._watch is not None:
            self._watch.wait(address, count, timeout, error)
        elif (seen := spin(address, count, timeout)) is not None:
            raise PeerTimeout(*error, seen, timeout)


class _Watch:
    """Stream memory operations whose waits end: a thread looks after those that are under way."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        from .backends.vmm import check

        self._driver, self._call, self._device = driver, check, device
        self._waiting: list[tuple[torch.cuda.Event, float, int, int, float, Awaited]] = []
        self._expired: PeerTimeout | None = None
        self._lock = threading.Condition()
        self._side = torch.cuda.Stream(device)
        self._thread: threading.Thread | None = None

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def raise_if_expired(self) -> None:
        if self._expired is not None:
            error, self._expired = self._expired, None
            raise error

    def write(self, address: int, value: int) -> None:
        # The default flag orders everything earlier in the stream before the word, for the whole system.
        self._call(self._driver.cuStreamWriteValue32(self._stream(), address, value, 0))

    def wait(self, address: int, value: int, timeout: float, error: Awaited) -> None:
        greater_or_equal = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call(self._driver.cuStreamWaitValue32(self._stream(), address, value, int(greater_or_equal)))
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._waiting.append((event, time.monotonic() + timeout, address, value, timeout, error))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weft-signals", daemon=True)
                self._thread.start()
            self._lock.notify()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            with self._lock:
                while not self._waiting:
                    self._lock.wait()
                self._waiting = [w for w in self._waiting if not w[0].query()]
                late = next((w for w in self._waiting if time.monotonic() > w[1]), None)
            if late is not None:
                self._release(*late)
            time.sleep(0.02)

    def _release(
        self,
        event: torch.cuda.Event,
        _deadline: float,
        address: int,
        value: int,
        timeout: float,
        error: Awaited,
    ) -> None:
        seen = ctypes.c_uint32()
        stream = self._side.cuda_stream
        self._call(self._driver.cuMemcpyDtoHAsync(ctypes.addressof(seen), address, 4, stream))
        self._call(self._driver.cuStreamSynchronize(stream))
        if not reached(seen.value, value):
            self._expired = PeerTimeout(*error, seen.value, timeout)
            self._call(self._driver.cuMemsetD32Async(address, value, 1, stream))
        event.synchronize()
