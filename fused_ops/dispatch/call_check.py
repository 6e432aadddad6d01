"""Calls of the ops as ranks compare them: the first one of each op, and in the checked mode every one.

Twice a call: its arguments, and the plan that was made of them, before anything is launched. Strides are compared by
what they lead to: ranks may lay out their own operands as they like, unless one of them then runs another algorithm
than the others. Sizes that no rank sends are compared where they choose the kernel alone (``own_dims``).

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
# Columns of products of what is gathered, and what products are summed over before they are reduced: of each argument
# the dimension, for elements of a list alternately. What travels has other sizes.
_OWN: dict[str, dict[str, tuple[int, ...]]] = {
    "fused_all_gather_matmul": {"Bs": (1,)},
    "fused_all_gather_scaled_matmul": {
        "Bs": (1,),
        "B_scales": (-1,),
        "biases": (-1,),
        "result_scales": (-1,),
    },
    "fused_matmul_reduce_scatter": {"A": (-1,), "B": (0,), "more": (-1, 0)},
    "fused_scaled_matmul_reduce_scatter": {"A": (-1,), "B": (0,), "A_scale": (-1,), "B_scale": (0,)},
    "fused_matmul_all_reduce": {"A": (-1,), "B": (0,)},
}
_SAME_ON_CUDA = " (on CUDA all sizes must be the same on all ranks: they choose the kernel)"
_SAME = " (sizes other than * must be the same on all ranks)"


def own_dims(op: str, argument: str, device_type: str) -> tuple[int, ...]:
    """The dimension of an op's argument in which each rank may have a size of its own; several are for a list.

    Empty on CUDA, where kernels are chosen by all sizes, and ranks with different kernels would wait for each other.
    """
    return _OWN.get(op, {}).get(argument, ()) if device_type == "cpu" else ()


def dims_of_element(own: tuple[int, ...], i: int) -> tuple[int, ...]:
    """Of element ``i`` of a list, whose ``own_dims`` these are."""
    return own[i % len(own) :][:1] if own else ()


class OpCall(NamedTuple):
    """A call that is about to be made."""

    op: str
    arguments: dict[str, object]
    device_type: str

    def __str__(self) -> str:
        said = [
            f"{name}={_text(value, own_dims(self.op, name, self.device_type))}"
            for name, value in self.arguments.items()
        ]
        return f"{self.op}({', '.join(said)})"

    @property
    def remark(self) -> str:
        """What the text does not say of sizes."""
        if self.op not in _OWN:
            return ""
        return _SAME if self.device_type == "cpu" else _SAME_ON_CUDA


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
    _current.begun = call = OpCall(op, arguments, device.type)
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
    checks.compare(call.op, str(call), call.remark, begins=what is None, what=what)
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


def _text(value: object, own: tuple[int, ...] = ()) -> str:
    """
    Args:
        own: dimensions whose sizes are not shown, as ``own_dims`` has them.
    """
    if isinstance(value, torch.Tensor):
        sizes = list(map(str, value.shape))
        for dim in own if sizes else ():
            sizes[dim] = "*"
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_text(each, dims_of_element(own, i)) for i, each in enumerate(value))}]"
    return repr(value)
