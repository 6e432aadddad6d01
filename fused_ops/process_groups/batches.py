"""Batches of sends and receives, which NCCL must get as one.

``torch.distributed.batch_isend_irecv`` makes them one for groups of exactly torch's own type. For any other it calls
one after the other, and ranks that send to each other before they receive would wait for each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from .work import DoneWork

_BATCH = inspect.unwrap(dist.batch_isend_irecv).__code__
_LIST = "p2p_op_list"  #: its argument


class Batch:
    """One call of ``batch_isend_irecv``, of which the group sees sends and receives."""

    def __init__(self, inner: ProcessGroup, operations: Any, device: torch.device) -> None:
        self.operations = operations
        self.work: Work | None = None
        self._inner, self._device = inner, device
        self._left = len(operations)
        inner._start_coalescing(device)

    def add(self, call: Callable[[], Any], tensors: list[Tensor]) -> BatchWork:
        """One of them; with the last one all are sent."""
        try:
            call()
            self._left -= 1
        except BaseException:
            self._left = 0
            self._inner._end_coalescing(self._device)
            raise
        if not self._left:
            self.work = self._inner._end_coalescing(self._device)
        return BatchWork(self, tensors)

    @property
    def is_sent(self) -> bool:
        return not self._left


class BatchWork(DoneWork):
    """Of one of them: that of all."""

    def __init__(self, batch: Batch, tensors: list[Tensor]) -> None:
        super().__init__(tensors)
        self._batch = batch

    def wait(self, timeout: timedelta | None = None) -> bool:
        work = self._batch.work
        return True if work is None else work.wait(timeout or timedelta(0))

    def is_completed(self) -> bool:
        work = self._batch.work
        return work is None or work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        work = self._batch.work
        return super().get_future() if work is None else work.get_future()


def operations_of_batch(frame: FrameType | None) -> Any:
    """The list that is being worked off, if the call in this frame comes from ``batch_isend_irecv``."""
    for _ in range(3):
        if frame is None:
            return None
        if frame.f_code is _BATCH:
            return frame.f_locals.get(_LIST)
        frame = frame.f_back
    return None
