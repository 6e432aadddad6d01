"""Work objects of the calls that weft takes: what ``async_op=True`` returns, and torch's C++ code waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from ...symm_mem import WeftError
from ...symm_mem.backends import cuda_state
from ...symm_mem.workspace import Workspace
from .options import seconds_of

_NAP = 0.0005  # seconds between two looks at a GPU's call
_LOOK = 1.0  # seconds between two looks whether a call between CPU ranks can still end


def not_ended(seconds: float) -> str:
    """What is said where it is not known for whom a call waits."""
    return f"the call has not ended within the {seconds:g} s of this wait"


class DoneWork(Work):
    """Of a call that has ended when it returns: between CPU ranks, or on CUDA in the order of the current stream.

    Args:
        tensors: what was written.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self.tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the tensors; on CUDA its callbacks run at once, on streams that wait for the call."""
        first = self.tensors[0]
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[first.device] if first.is_cuda else None
        )
        future.set_result(self.tensors)
        return future


class HostWork(DoneWork):
    """Of a call between CPU ranks that another thread makes. ``finish`` ends it.

    Args:
        workspace: where it is made, or the call before it.
        why_stuck: what to raise instead of a wait, if that other thread does not get to the call.
    """

    def __init__(
        self, tensors: list[Tensor], workspace: Workspace[Any], why_stuck: Callable[[], WeftError | None]
    ) -> None:
        super().__init__(tensors)
        self._workspace, self._why_stuck = workspace, why_stuck
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def finish(
        self, error: BaseException | None = None, before_callbacks: Callable[[], object] = lambda: None
    ) -> None:
        """``before_callbacks``: called where there may be some. They may take long, and make calls of their own."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            before_callbacks()
            self._tell(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """
        Raises:
            WeftError: the call has failed, or this thread would wait for itself, or for one that does not go on.
            PeerTimeout: it has not ended within ``timeout``, and waits for this rank. It goes on: one may wait again.
            ForkedProcess: it is a call of the process that this one was forked from.
        """
        seconds = seconds_of(timeout)
        if not self._ended.is_set():
            self._workspace.heap.owner.refuse_child("wait")
            self._wait_until_it_ends(seconds)
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_it_ends(self, seconds: float | None) -> None:
        end = float("inf") if seconds is None else time.monotonic() + seconds
        left = 0.0
        while not self._ended.wait(left):
            if (why := self._why_stuck()) is not None:
                raise why
            left = min(_LOOK, end - time.monotonic())
            if left <= 0:
                assert seconds is not None
                raise self._workspace.still_waiting(seconds) or WeftError(not_ended(seconds))

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
            ended = self._ended.is_set()
        if ended:
            self._tell(future)
        return future

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self.tensors)
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)
        else:  # Ctrl-C
            future.set_exception(RuntimeError(repr(self._error)))


class StreamWork(DoneWork):
    """Of a call on CUDA that runs on a stream of the group's.

    Args:
        read: tensors that must stay until a stream waits for the call, in addition to those that are written.
        ended: the event after it.
        side: its stream.
    """

    def __init__(
        self, tensors: list[Tensor], read: list[Tensor], ended: torch.cuda.Event, side: torch.cuda.Stream
    ) -> None:
        super().__init__(tensors)
        self._held = [*tensors, *read]
        self._ended, self._side = ended, side

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits for the call; the host only with a ``timeout``, as for NCCL's.

        Raises:
            WeftError: it has not ended within ``timeout``. It goes on, until its own deadline.
        """
        cuda, device = cuda_state.state, self._side.device_index
        self._ended.wait(cuda.stream(cuda.current_stream(device), device))
        self._held = []
        if (seconds := seconds_of(timeout)) is not None:
            end = time.monotonic() + seconds
            while not self._ended.query():
                if time.monotonic() > end:
                    raise WeftError(not_ended(seconds))
                time.sleep(_NAP)
        return True

    def is_completed(self) -> bool:
        return self._ended.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        with cuda_state.state.make_stream_current(self._side):  # what follows it waits for this stream
            return super().get_future()

    def __del__(self) -> None:
        for tensor in self._held:  # nobody has waited: their memory is used again when the call has ended
            tensor.record_stream(self._side)
