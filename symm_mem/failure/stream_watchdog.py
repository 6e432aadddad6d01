"""Stream memory operations whose waits end.

A stream's wait for a word cannot be given a deadline. So a thread watches the pending ones. When a deadline passes,
which counts from when the stream has reached the wait, it breaks the group, sets the word by which kernels know that
their input is invalid (fault.py), and writes the awaited count itself, so that the stream goes on and the context stays
usable. One thread for each heap, and only while a wait is pending.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import errors
from ..errors import PeerTimeout, PeerWait, WaitOutcome
from ..layout import WORD
from .fault import Fault
from .spin_wait import reached

if TYPE_CHECKING:
    from ..heap.heap import Heap

_PERIOD = 0.02  # seconds between two looks


@dataclass(eq=False)
class _Wait:
    begins: torch.cuda.Event  # after all that the stream does before
    ends: torch.cuda.Event | None  # None: it is being put on the stream, or an exception came meanwhile
    awaited: tuple[int, int]  # address, and what is to be there
    timeout: float
    fault: Fault
    about: PeerWait
    begun: float | None = None  # when the stream has come to it
    warned: bool = False


def stream_watchdog_of(heap: Heap) -> StreamWatchdog | None:
    """The watchdog of a heap's stream waits; None on the CPU, where a wait bounds itself."""
    if heap.device.type != "cuda":
        return None
    with heap.lock:
        if heap.watch is None:
            heap.watch = StreamWatchdog(heap.device)
            heap.users.add(heap.watch)
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

    def write(self, address: int, value: int) -> None:
        # The default flag orders everything earlier in the stream before the word, for the whole system.
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._call(self._driver.cuStreamWriteValue32(stream, address, value, 0))

    def wait(self, address: int, value: int, timeout: float, fault: Fault, about: PeerWait) -> None:
        """``fault``: what breaks if the deadline passes, before the stream goes on. ``about``: the wait, for errors.

        It is watched before it is put on the stream: whatever exception comes in between, it ends.
        """
        stream = torch.cuda.current_stream(self._device)
        begins, ends = torch.cuda.Event(), torch.cuda.Event()
        begins.record(stream)
        greater_or_equal = int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        wait = _Wait(begins, None, (address, value), timeout, fault, about)
        self._watch(wait)
        result = self._driver.cuStreamWaitValue32(stream.cuda_stream, address, value, greater_or_equal)
        try:
            self._call(result)
        except RuntimeError:  # the driver has refused it: there is nothing to watch
            self._drop(wait)
            raise
        ends.record(stream)
        wait.ends = ends

    def _watch(self, wait: _Wait) -> None:
        with self._lock:
            self._waiting.append(wait)
            if not self._running:
                try:
                    threading.Thread(target=self._run, name="weft-signals", daemon=True).start()
                except BaseException:
                    self._waiting.remove(wait)
                    raise
                self._running = True

    def _drop(self, wait: _Wait) -> None:
        with self._lock:
            self._waiting = [w for w in self._waiting if w is not wait]

    def reset_state(self) -> None:
        """The heap is being reset, and all work is done: what an exception has left half-made has ended, if it began.

        It would take the words, which count anew, for late.
        """
        with self._lock:
            self._waiting = [w for w in self._waiting if w.ends is not None]

    def _run(self) -> None:
        try:
            self._watch_until_all_end()
        except BaseException:
            with self._lock:
                self._running = False  # the next wait starts another thread, which watches what is left
            raise

    def _watch_until_all_end(self) -> None:
        from ..backends.vmm import relaxed_capture

        torch.cuda.set_device(self._device)
        with relaxed_capture():  # a look at an event must not end another thread's capture
            while True:
                with self._lock:
                    self._waiting = [w for w in self._waiting if w.ends is None or not w.ends.query()]
                    if not self._waiting:
                        self._running = False
                        return
                    late = next((w for w in self._waiting if self._is_late(w)), None)
                if late is not None:
                    self._release(late)
                time.sleep(_PERIOD)

    def _is_late(self, wait: _Wait) -> bool:
        now = time.monotonic()
        if wait.begun is None:
            if wait.begins.query():
                wait.begun = now
            return False
        if not wait.warned and now - wait.begun > errors.SILENT:
            errors.name_late_rank(wait.about, now - wait.begun)
            wait.warned = True
        return now - wait.begun > wait.timeout

    def _release(self, late: _Wait) -> None:
        seen = ctypes.c_uint32()
        stream = self._side
        self._call(self._driver.cuMemcpyDtoHAsync(ctypes.addressof(seen), late.awaited[0], 4, stream))
        self._call(self._driver.cuStreamSynchronize(stream))
        if not reached(seen.value, late.awaited[1]):
            fault = late.fault
            fault.breaks(PeerTimeout(late.about, WaitOutcome(seen.value, late.timeout)))
            broken = fault.address + WORD * fault.BROKEN, 1 + late.about.peer
            for address, value in (broken, late.awaited):
                self._call(self._driver.cuMemsetD32Async(address, value, 1, stream))
        if late.ends is not None:
            late.ends.synchronize()
            return
        self._drop(late)  # nothing tells when it ends, but it does: its word is written
