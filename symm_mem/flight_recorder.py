"""The flight recorder: the last calls of this rank, in the form in which torch's own keeps those of NCCL and gloo.

torch has no place for calls of others before 2.15, and from then on records what goes through its dispatcher, which
weft's calls do not. So they are kept here, one entry a call, and put among torch's where they are dumped
(failure/flight_dump.py).

It is on where TORCH_FR_BUFFER_SIZE says how many calls are kept. Off, a call asks whether ``calls`` is None.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .call_site import Site

GATHER, SCATTER, REDUCE, EXCHANGE, TO_ROOT = (
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_reduce",
    "all_to_all",
    "gather",
)  # as torch's analyzer calls them


class CallShape(NamedTuple):
    """What a call of an op sends, as a collective of torch.

    Attributes:
        kind: which one.
        x: sizes of what each rank has of it.
        dtype: of x.
        device: "cpu" or "cuda".
    """

    kind: str
    x: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(slots=True)
class RecordedCall:
    """
    Attributes:
        created: nanoseconds since 1970, as ``started`` and ``ended``; 0: not yet, or on CUDA, where the host does not
            see it.
        sequence: of the group's calls that are weft's, from 1 on.
    """

    op: str
    group: str
    shape: CallShape
    site: Site | None
    sequence: int
    created: int
    started: int = 0
    ended: int = 0


class KnownGroup(NamedTuple):
    """Attributes:
    ranks: global ones.
    """

    desc: str
    ranks: list[int]


class _ThisThread(threading.local):
    call: RecordedCall | None = None  #: that it has begun on the slow path


def _kept() -> int:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        text = os.environ.get(name)
        if text is not None:
            return int(text) if text.isdigit() else 0  # torch says what is wrong with it
    return 0


#: What is launched like a call before is kept as the fields of a RecordedCall, which is made in a third of the time.
calls: deque[RecordedCall | tuple[Any, ...]] | None = deque(maxlen=_kept()) if _kept() else None
counts: dict[str, int] = {}  #: calls of each group
groups: dict[str, KnownGroup] = {}
#: Called with the first call of a group, and with what has broken one.
at_first_call: Callable[[], None] | None = None
at_failure: Callable[[BaseException], None] | None = None
this_thread = _ThisThread()


def collective_of(op: str) -> str:
    """As what torch's analyzer takes a call of an op of weft's."""
    kinds = {"all_gather": GATHER, "reduce_scatter": SCATTER, EXCHANGE: EXCHANGE, "one_shot_gather": TO_ROOT}
    return next((kind for word, kind in kinds.items() if word in op), REDUCE)


def shape_of(op: str, tensors: Sequence[Tensor]) -> CallShape:
    """Of a call of one of weft's ops, whose first tensor is x, or A before B."""
    x, kind = tensors[0], collective_of(op)
    sizes = tuple(x.shape)
    if "matmul_" in op:  # what is sent is the product
        sizes = (*sizes[:-1], tensors[1].shape[-1])
    return CallShape(kind, sizes, x.dtype, x.device.type)


def launched(op: str, group: str, shape: CallShape | None, site: Site | None) -> None:
    """A call on CUDA like one before is being launched."""
    assert calls is not None
    counts[group] = sequence = counts.get(group, 0) + 1
    calls.append((op, group, shape, site, sequence, time.time_ns()))


def begin(op: str, group: ProcessGroup, shape: CallShape, site: Site | None) -> None:
    """A call that this thread has begun on the slow path."""
    name = group.group_name
    if name not in groups:
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # torch does not know it
            ranks = list(range(group.size()))
        groups[name] = KnownGroup(group.group_desc, ranks)
        if at_first_call is not None:
            at_first_call()
    counts[name] = sequence = counts.get(name, 0) + 1
    this_thread.call = call = RecordedCall(op, name, shape, site, sequence, time.time_ns())
    if shape.device == "cpu":
        call.started = call.created
    assert calls is not None
    calls.append(call)


def runs_unfused() -> None:
    """The call that this thread has begun goes to NCCL or gloo, whose it is in torch's recorder."""
    if calls is None:
        return
    call, this_thread.call = this_thread.call, None
    if call is not None and call in calls:
        calls.remove(call)
        counts[call.group] -= 1


def take_recorded() -> RecordedCall | None:
    """The call that this thread has begun, which somebody else ends."""
    if calls is None:
        return None
    call, this_thread.call = this_thread.call, None
    return call


def end(call: RecordedCall | None) -> None:
    """It has ended, if it is one between CPU ranks."""
    if call is not None and call.shape.device == "cpu":
        call.ended = time.time_ns()


def failed(error: BaseException) -> None:
    """A group is broken on this rank."""
    if calls is not None and at_failure is not None:
        at_failure(error)


def sizes_of(shape: CallShape, ranks: int) -> tuple[list[int], list[int]]:
    """Of what goes into a collective and what comes out of it."""
    x = list(shape.x)
    if shape.kind == GATHER:
        return x, [ranks, *x]
    if shape.kind == SCATTER:
        count = 1
        for size in x:
            count *= size
        return x, [count // ranks]
    return x, x


def dtype_name(dtype: torch.dtype) -> str:
    """As torch's recorder has it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


_NAMES: dict[Any, str] = {
    torch.float32: "Float", torch.float16: "Half", torch.float64: "Double", torch.bfloat16: "BFloat16",
    torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
}  # fmt: skip
