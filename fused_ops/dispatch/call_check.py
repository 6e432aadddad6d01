"""Calls of the ops as ranks compare them: the first one of each op, and in the checked mode every one.

Twice a call: its arguments, and the plan that was made of them, before anything is launched. Strides are compared by
what they lead to: ranks may lay out their own operands as they like, unless one of them then runs another algorithm
than the others. Sizes that no rank sends are compared where they choose the kernel alone (``Op.own_dims``).

A first call is the first of its op on a heap, or after a reset. Ranks that make the same calls come to it together,
and it never takes the fast path: a call like it was not made before. A rank that makes another call instead is waited
for up to the group's deadline. What ranks compile comes after the comparison, with a deadline of its own
(``Heap.prepare``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from ...symm_mem import HeapUnavailable, flight_recorder, forks, is_checked
from ...symm_mem.call_site import call_site, calling
from ...symm_mem.failure.call_check import CallCheck, call_check_of, compares_first_calls
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import get_heap

_SAME_ON_CUDA = " (on CUDA all sizes must be the same on all ranks: they choose the kernel)"
_SAME = " (sizes other than * must be the same on all ranks)"


def own_dims_on(device_type: str, op: Any) -> Mapping[str, tuple[int, ...]]:
    """``own_dims`` of an ``Op``, or of a call of one, where ranks may have sizes of their own."""
    found: Mapping[str, tuple[int, ...]] = op.own_dims if device_type == "cpu" or op.own_on_cuda else {}
    return found


def dims_of_element(own: tuple[int, ...], i: int) -> tuple[int, ...]:
    """Of element ``i`` of a list, whose ``own_dims`` these are."""
    return own[i % len(own) :][:1] if own else ()


class OpCall(NamedTuple):
    """A call that is about to be made.

    Attributes:
        own_dims, own_on_cuda, prepares: as ``Op`` has them.
    """

    op: str
    arguments: dict[str, object]
    device_type: str
    own_dims: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    own_on_cuda: bool = False
    prepares: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = own_dims_on(self.device_type, self)
        said = [f"{name}={_text(value, own.get(name, ()))}" for name, value in self.arguments.items()]
        return f"{self.op}({', '.join(said)})"

    @property
    def remark(self) -> str:
        """What the text does not say of sizes."""
        if not self.own_dims:
            return ""
        return _SAME if own_dims_on(self.device_type, self) else _SAME_ON_CUDA


class _Current(threading.local):
    begun: OpCall | None = None  #: that has not come to its heap yet
    call: tuple[CallCheck, OpCall, str | None] | None = None  #: whose plan is still to come, and which it is
    left_out = False  #: its calls are not compared


_current = _Current()


def leave_out(value: bool) -> bool:
    """Whether this thread's calls are left out of all comparisons from here on, as other ranks may replay theirs from a
    CUDA graph. Returns what it was."""
    before, _current.left_out = _current.left_out, value
    return before


def begin_call(call: OpCall, group: ProcessGroup, device: torch.device) -> None:
    """A call is about to be made. In the checked mode every rank must be about to make the same one.

    Groups without a heap are not checked: their calls are collectives of the group's own backend.

    Raises:
        RankMismatch: on every rank, naming the first one that differs.
        PeerTimeout: a rank makes no call.
        ForkedProcess: this process was forked from the one that joined the group.
        WeftError: the group is broken on this rank.
    """
    if forks.inherited and group.size() > 1:
        forks.refuse_child(group, call.op)  # before anything of the call's own, as a product on a GPU
    flight_recorder.take_recorded()
    if flight_recorder.calls is not None and group.size() > 1:
        flight_recorder.begin(call.op, group, _shape(call), call_site())
    calling.op, _current.call = call.op, None
    _current.begun = None if _current.left_out else call
    if not is_checked() or _current.left_out or group.size() == 1:
        return
    _current.begun = None
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
    checks.compare(call.op, str(call), call.remark, begins=what is None, what=what)
    _current.call = checks, call, what


def compare_plan(plan: str, reason: str) -> None:
    """Every rank must run this call in the same way, if it is one that is compared.

    Args:
        reason: why it is unfused, which may differ.

    Raises:
        RankMismatch: on every rank, naming the first one that differs.
        PeerTimeout: a rank does not come so far.
    """
    if _current.call is not None:
        (checks, call, what), _current.call = _current.call, None
        because = f" because {reason}" if reason else ""
        checks.compare(call.op, f"{call.op} by {plan}", because, begins=False, what=what)
        checks.compared.update((call.op, *call.prepares))


def plan_is_compared() -> bool:
    """Whether ``compare_plan`` has something to compare."""
    return _current.call is not None


def _shape(call: OpCall) -> flight_recorder.CallShape:
    if "elements" in call.arguments:  # of a process group's call
        sizes: Any = (call.arguments["elements"],)
        dtype: Any = call.arguments["dtype"]
        return flight_recorder.CallShape(
            flight_recorder.collective_of(call.op), sizes, dtype, call.device_type
        )
    tensors: list[torch.Tensor] = []
    for value in call.arguments.values():
        tensors += [
            t for t in (value if isinstance(value, Sequence) else (value,)) if isinstance(t, torch.Tensor)
        ]
    return flight_recorder.shape_of(call.op, tensors)


def _text(value: object, own: tuple[int, ...] = ()) -> str:
    """
    Args:
        own: dimensions whose sizes are not shown, as ``Op.own_dims`` has them.
    """
    if isinstance(value, torch.Tensor):
        sizes = list(map(str, value.shape))
        for dim in own if sizes else ():
            sizes[dim] = "*"
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_text(each, dims_of_element(own, i)) for i, each in enumerate(value))}]"
    return repr(value)
