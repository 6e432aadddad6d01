"""When a stream's wait for a word is late, without a GPU: events are switches."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from weft.symm_mem.backends import vmm
from weft.symm_mem.failure import stream_watchdog


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()


def test_a_deadline_counts_from_when_the_stream_has_come_to_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(vmm, "relaxed_capture", nullcontext)
    looks: Any = object.__new__(stream_watchdog.StreamWatchdog)
    released: list[float] = []
    begins, ends = Event(), Event()

    def release(late: Any) -> None:
        released.append(time.monotonic())
        ends.done.set()

    looks._device, looks._lock, looks._running, looks._release = None, threading.Lock(), True, release
    arguments: Any = (begins, ends, (0, 1), 0.2, None, (0, 1))
    looks._waiting = [stream_watchdog._Wait(*arguments)]
    thread = threading.Thread(target=looks._run)
    thread.start()
    time.sleep(0.5)
    assert not released, "the stream has not begun to wait"
    begun = time.monotonic()
    begins.done.set()
    thread.join(10)
    assert len(released) == 1 and released[0] - begun > 0.2 and not looks._running
