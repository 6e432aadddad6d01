"""Calls of the ops as ranks compare them: the first one of each op, and in the checked mode every one.

Twice a call: its arguments, and the plan that was made of them, before anything is launched. Strides are compared by
what they lead to: ranks may lay out their own operands as they like, unless one of them then runs another algorithm
than the others.

A first call is the first of its op on a heap, or behind a reset. Ranks that make the same calls come to it together,
and it never takes the fast path: a call like it was not made before. A rank that makes another call instead is waited
for up to the group's deadline. What ranks compile comes behind the comparison, with a deadline of its own
(``Heap.prepare``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from ...symm_mem import HeapUnavailable, flight_recorder, forks, is_checked
from ...symm_mem.call_site import call_site, calling
from ...symm_mem.failure.call_check import CallCheck, call_check_of, compares_first_calls
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import get_heap
from .planning import is_planning

_ALL_REDUCE = "one_shot_all_reduce"
# What a first call of an op prepares for others, whose calls may take the fast path then on a part of the ranks, as
# their tensors lie: they have no first call any more.
_PREPARES = {
    "one_shot_all_reduce_": (_ALL_REDUCE,),
    _ALL_REDUCE: ("one_shot_all_reduce_",),
    "fused_all_reduce_rms_norm": (_ALL_REDUCE, "one_shot_all_reduce_"),
    "fused_all_reduce_layer_norm": (_ALL_REDUCE, "one_shot_all_reduce_"),
    "fused_all_reduce_rms_norm_quant": (_ALL_REDUCE, "one_shot_all_reduce_"),
    "fused_matmul_all_reduce": (_ALL_REDUCE, "one_shot_all_reduce_"),
}


class OpCall(NamedTuple):
    """A call that is about to be made."""

    op: str
    arguments: dict[str, object]

    def __str__(self) -> str:
        said = ", ".join(f"{name}={_text(value)}" for name, value in self.arguments.items())
        return f"{self.op}({said})"


class _Current(threading.local):
    begun: OpCall | None = None  #: that has not come to its heap yet
    call: tuple[CallCheck, str, str | None] | None = (
        None  #: whose plan is still to come: checks, op, which call
    )


_current = _Current()


def begin_call(op: str, group: ProcessGroup, device: torch.device, **arguments: object) -> None:
    """A call is about to be made. In the checked mode every rank must be about to make the same one.

    Groups without a heap are not checked: their calls are collectives of the group's own backend.

    Raises:
        RankMismatch: on every rank, naming the first one that differs.
        PeerTimeout: a rank makes no call.
        ForkedProcess: this process was forked from the one that joined the group.
        WeftError: the group is broken on this rank.
    """
    if is_planning():
        return
    flight_recorder.take_recorded()
    if flight_recorder.calls is not None and group.size() > 1:
        flight_recorder.begin(op, group, _shape(op, device, arguments), call_site())
    calling.op, _current.call = op, None
    _current.begun = call = OpCall(op, arguments)
    if not is_checked() or group.size() == 1:
        return
    _current.begun = None
    forks.refuse_child(group, op)
    try:
        where = get_heap(group, device)
    except HeapUnavailable:
        return
    refuse_if_broken(where)
    _compare(call_check_of(where), call, None)


def take_begun() -> OpCall | None:
    """The call that this thread has begun; None if it was compared, or taken before."""
    begun, _current.begun = _current.begun, None
    return begun


def compare_first_call(where: Heap, call: OpCall | None) -> None:
    """If it is the first of its op on the heap, every rank must be about to make this call.

    Raises:
        RankMismatch: on every rank, naming the first one that differs. The group is usable afterwards.
        PeerTimeout: a rank makes no call, or one that is not the first of its op.
    """
    if call is None:
        return
    known: CallCheck | None = where.call_check
    if (known is not None and call.op in known.compared) or not compares_first_calls():
        return
    _compare(call_check_of(where), call, "first call of an op")


def _compare(checks: CallCheck, call: OpCall, what: str | None) -> None:
    checks.compare(call.op, str(call), begins=what is None, what=what)
    _current.call = checks, call.op, what


def compare_plan(plan: str, reason: str) -> None:
    """Every rank must run this call in the same way, if it is one that is compared.

    Args:
        reason: why it is unfused, which may differ.

    Raises:
        RankMismatch: on every rank, naming the first one that differs.
        PeerTimeout: a rank does not come so far.
    """
    if _current.call is not None:
        (checks, op, what), _current.call = _current.call, None
        because = f" because {reason}" if reason else ""
        checks.compare(op, f"{op} by {plan}", because, begins=False, what=what)
        checks.compared.update((op, *_PREPARES.get(op, ())))


def plan_is_compared() -> bool:
    """Whether ``compare_plan`` has something to compare."""
    return _current.call is not None


def _shape(op: str, device: torch.device, arguments: dict[str, object]) -> flight_recorder.CallShape:
    if "elements" in arguments:  # of a process group's call
        sizes: Any = (arguments["elements"],)
        dtype: Any = arguments["dtype"]
        return flight_recorder.CallShape(flight_recorder.collective_of(op), sizes, dtype, device.type)
    tensors: list[torch.Tensor] = []
    for value in arguments.values():
        tensors += [
            t for t in (value if isinstance(value, Sequence) else (value,)) if isinstance(t, torch.Tensor)
        ]
    return flight_recorder.shape_of(op, tensors)


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
