"""Batches of sends and receives, which NCCL must get as one.

``torch.distributed.batch_isend_irecv`` makes them one for groups of exactly torch's own type. For any other it calls
one after the other, and ranks that send to each other before they receive would wait for each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

_BATCH = inspect.unwrap(dist.batch_isend_irecv).__code__
_LIST = "p2p_op_list"  #: its argument


def send_as_one(inner: ProcessGroup, operations: Sequence[dist.P2POp], device: torch.device) -> list[Work]:
    """Sends and receives all of a batch but for those of tensors on CPU, where ``device`` is none; for each of them the
    work, that of all. The backend refuses what is on another device of this kind."""
    sent = [each for each in operations if each.tensor.device.type == device.type]
    inner._start_coalescing(device)
    try:
        for each in sent:
            x = torch.view_as_real(each.tensor) if each.tensor.is_complex() else each.tensor
            (inner.send if each.op is dist.isend else inner.recv)([x], each.group_peer, each.tag)
    finally:
        work = inner._end_coalescing(device)
    return [work] * len(sent)


def operations_of_batch(frame: FrameType | None) -> Any:
    """The list that is being worked off, if the call in this frame comes from ``batch_isend_irecv``."""
    for _ in range(3):
        if frame is None:
            return None
        if frame.f_code is _BATCH:
            return frame.f_locals.get(_LIST)
        frame = frame.f_back
    return None
