"""When a stream's wait for a word is late, without a GPU: events are switches."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from weft.symm_mem import errors
from weft.symm_mem.backends import vmm
from weft.symm_mem.errors import PeerWait
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
    arguments: Any = (begins, ends, (0, 1), 0.2, None, None)
    looks._waiting = [stream_watchdog._Wait(*arguments)]
    thread = threading.Thread(target=looks._run)
    thread.start()
    time.sleep(0.5)
    assert not released, "the stream has not begun to wait"
    begun = time.monotonic()
    begins.done.set()
    thread.join(10)
    assert len(released) == 1 and released[0] - begun > 0.2 and not looks._running


class Stage:
    """A driver and events that note what is put on the stream. What is listed in ``fails`` raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_stream: list[str] = []
        self.fails: set[str] = set()
        self.watched: list[int] = []  # waits that are watched while each one is put on the stream
        self.told: list[int] = []
        self.about = PeerWait("wait", "0", 0, 1, "channel 0", 5, "model.py:7")
        stage = self

        class Noted(Event):
            def record(self, stream: Any) -> None:
                name = "ends" if "begins" in stage.on_stream else "begins"
                if name in stage.fails:
                    raise KeyboardInterrupt
                stage.on_stream.append(name)
                self.done.set()

        stream = SimpleNamespace(cuda_stream=7)
        monkeypatch.setattr(torch.cuda, "Event", Noted)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(vmm, "relaxed_capture", nullcontext)
        self.watch: Any = object.__new__(stream_watchdog.StreamWatchdog)
        self.watch._device, self.watch._lock, self.watch._running = None, threading.Lock(), False
        self.watch._waiting, self.watch._side = [], 9
        self.watch._call, self.watch._driver = self.check, self
        self.CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)

    @staticmethod
    def check(result: tuple[Any]) -> None:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(result[0].name)

    def cuStreamWaitValue32(self, *_: int) -> tuple[Any]:
        self.watched.append(len(self.watch._waiting))
        if "interrupted" in self.fails:
            raise KeyboardInterrupt
        if "refused" in self.fails:
            return (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.on_stream.append("wait")
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, *_: int) -> tuple[Any]:
        return (driver.CUresult.CUDA_SUCCESS,)  # the word is 0

    cuStreamSynchronize = cuMemcpyDtoHAsync

    def cuMemsetD32Async(self, address: int, value: int, *_: int) -> tuple[Any]:
        self.on_stream.append(f"{address} is {value}")
        return (driver.CUresult.CUDA_SUCCESS,)

    def wait(self, timeout: float) -> None:
        fault: Any = SimpleNamespace(address=200, BROKEN=0, breaks=lambda error: self.told.append(error.seen))
        self.watch.wait(100, 5, timeout, fault, self.about)

    def at_rest(self) -> bool:
        end = time.monotonic() + 10
        while self.watch._running and time.monotonic() < end:
            time.sleep(0.01)
        return not self.watch._running and not self.watch._waiting


@pytest.mark.parametrize("fails", ["interrupted", "ends"])
def test_a_wait_ends_whatever_exception_comes_while_it_is_put_on_the_stream(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    stage = Stage(monkeypatch)
    stage.fails.add(fails)
    with pytest.raises(KeyboardInterrupt):
        stage.wait(0.1)
    assert stage.watched == [1], "watched before it is there"
    assert stage.at_rest() and stage.told == [0]
    assert stage.on_stream[-2:] == ["200 is 2", "100 is 5"]


def test_a_wait_that_the_driver_refuses_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.fails.add("refused")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        stage.wait(0.1)
    assert stage.at_rest() and not stage.told and stage.on_stream == ["begins"]


def test_no_wait_is_put_on_the_stream_that_no_thread_can_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            stage.wait(0.1)
    assert stage.on_stream == ["begins"] and stage.at_rest()
    stage.wait(0.1)
    assert stage.on_stream[-2:] == ["wait", "ends"]
    assert stage.at_rest() and not stage.told


def test_a_reset_ends_the_watch_over_what_is_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.fails.add("ends")
    with pytest.raises(KeyboardInterrupt):
        stage.wait(60)
    stage.watch.reset_state()
    assert stage.at_rest() and not stage.told


def test_a_late_rank_is_named_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(monkeypatch)
    stage.fails.add("ends")
    monkeypatch.setattr(errors, "SILENT", 0.1)
    with pytest.raises(KeyboardInterrupt):
        stage.wait(0.6)
    assert stage.at_rest() and stage.told == [0]
    (line,) = caplog.messages
    assert (
        line.startswith("wait: rank 0 of group '0' has waited 0 s for rank 1, since ")
        and "model.py:7" in line
    )
