"""Stream memory operations whose waits end.

A stream's wait for a word cannot be given a deadline. So a thread watches the pending ones. When a deadline passes,
which counts from when the stream has reached the wait, it reports the expiry to the caller, sets the word by which
kernels know that their input is invalid (fault.py), and writes the awaited count itself, so that the stream goes on and
the context stays usable. One thread for each heap, and only while a wait is pending.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..errors import WaitOutcome
from .spin_wait import reached

if TYPE_CHECKING:
    from ..heap.heap import Heap

# What is told of an expired wait: the word's value, and the seconds waited.
Expiry: TypeAlias = Callable[[WaitOutcome], object]
# Address, and what is written there.
Word: TypeAlias = tuple[int, int]

_PERIOD = 0.02  # seconds between two looks


@dataclass
class _Wait:
    begins: torch.cuda.Event  # behind all that the stream does before
    ends: torch.cuda.Event
    awaited: Word
    timeout: float
    expiry: Expiry
    broken: Word
    deadline: float | None = None  # not before it begins


def stream_watchdog_of(heap: Heap) -> StreamWatchdog | None:
    """The watchdog of a heap's stream waits; None on the CPU, where a wait bounds itself."""
    if heap.device.type != "cuda":
        return None
    with heap.lock:
        if heap.watch is None:
            heap.watch = StreamWatchdog(heap.device)
        return heap.watch


class StreamWatchdog:
    """Writes to and waits for words in the order of the current stream."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        from ..backends.vmm import check_driver, own_stream

        self._driver, self._call, self._device = driver, check_driver, device
        self._waiting: list[_Wait] = []
        self._lock = threading.Lock()
        self._side = own_stream(self, device)
        self._running = False

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def write(self, address: int, value: int) -> None:
        # The default flag orders everything earlier in the stream before the word, for the whole system.
        self._call(self._driver.cuStreamWriteValue32(self._stream(), address, value, 0))

    def wait(self, address: int, value: int, timeout: float, expiry: Expiry, broken: Word) -> None:
        """``broken``: what is written if the deadline passes, before the stream goes on."""
        stream = torch.cuda.current_stream(self._device)
        begins, ends = torch.cuda.Event(), torch.cuda.Event()
        begins.record(stream)
        greater_or_equal = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call(self._driver.cuStreamWaitValue32(self._stream(), address, value, int(greater_or_equal)))
        ends.record(stream)
        with self._lock:
            self._waiting.append(_Wait(begins, ends, (address, value), timeout, expiry, broken))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="weft-signals", daemon=True).start()

    def _run(self) -> None:
        from ..backends.vmm import relaxed_capture

        torch.cuda.set_device(self._device)
        with relaxed_capture():  # a look at an event must not end another thread's capture
            while True:
                with self._lock:
                    self._waiting = [w for w in self._waiting if not w.ends.query()]
                    if not self._waiting:
                        self._running = False
                        return
                    late = next((w for w in self._waiting if self._is_late(w)), None)
                if late is not None:
                    self._release(late)
                time.sleep(_PERIOD)

    def _is_late(self, wait: _Wait) -> bool:
        if wait.deadline is None:
            if wait.begins.query():
                wait.deadline = time.monotonic() + wait.timeout
            return False
        return time.monotonic() > wait.deadline

    def _release(self, late: _Wait) -> None:
        seen = ctypes.c_uint32()
        stream = self._side
        self._call(self._driver.cuMemcpyDtoHAsync(ctypes.addressof(seen), late.awaited[0], 4, stream))
        self._call(self._driver.cuStreamSynchronize(stream))
        if not reached(seen.value, late.awaited[1]):
            late.expiry(WaitOutcome(seen.value, late.timeout))
            for address, value in (late.broken, late.awaited):
                self._call(self._driver.cuMemsetD32Async(address, value, 1, stream))
        late.ends.synchronize()
