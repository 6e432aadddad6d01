"""one_shot_all_reduce: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from ...kernels.all_reduce import IN_PLACE, OP
from ...kernels.all_reduce.reference import reference_all_reduce
from ...kernels.device.collective.host_exchange import reduce_parts
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.all_reduces import choose_sum, prepare_all_reduce
from ..dispatch.choice import Choice, launch_exchange, unfused
from ..dispatch.launch_cache import PreparedKernel, remember_call
from ..dispatch.plan import heap_or_reason, ran
from ..dispatch.stand_alone import KINDS
from ..dispatch.stream_order import in_stream_order
from .gradients import OneTensorFunction
from .op import Op

BOTH = (OP, IN_PLACE)  #: the ops that are prepared with each other


class AllReduceCall(NamedTuple):
    """Also of an all-reduce in place."""

    x: Tensor
    reduce_op: str
    group_name: str
    group_size: int | None = None


def _validate(call: AllReduceCall) -> tuple[AllReduceCall, ProcessGroup]:
    group = resolve_group(call.group_name)
    validation.float_dtype("x", call.x)
    validation.reduction(call.reduce_op, validation.ALL_REDUCE_OPS)
    return call, group


def validate_in_place(call: AllReduceCall) -> tuple[AllReduceCall, ProcessGroup]:
    validation.overwritten("x", call.x)
    return _validate(call)


def run_by_choice(
    choice: Choice,
    where: Heap | None,
    call: AllReduceCall,
    group: ProcessGroup,
    out: Tensor | None = None,
    op: str = OP,
) -> Tensor:
    """As the op, by a choice; ``op``: whose call it is, for errors."""
    x, reduce_op = call.x, call.reduce_op
    if where is None or choice.is_unfused:
        ran(choice.plan_of())
        result = reference_all_reduce(x, reduce_op, group)
        return result if out is None else out.copy_(result)
    source = x.contiguous()
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if choice.algorithm == "host":
        workspace = choice.begin_on(where)
        reduce_parts(workspace, [source.view(-1)] * where.world_size, out.view(-1), reduce_op, op)
        return out
    prepared = all_reduce_on_cuda(choice, where, (source, out), reduce_op, op)
    remember_call(op, choice.known, [source], None if out is x else [out], prepared, alignment=1)
    return out


def sum_without_kernel(
    choice: Choice, where: Heap | None, x: Tensor, reduce_op: str, group: ProcessGroup, op: str
) -> Tensor:
    """As a part of a call of ``op`` that runs unfused or between CPU ranks: where that has no kernel of its own, the
    all-reduce may have one."""
    call = AllReduceCall(x, reduce_op, group.group_name)
    if choice.algorithm == "host":
        return run_by_choice(choice, where, call, group, op=op)
    own = heap_or_reason(op, "all_reduce", x.device, group, empty=x.numel() == 0)
    if isinstance(own, str):
        total = run_by_choice(unfused(own), None, call, group, op=op)
    else:
        total = run_by_choice(choose_sum(x, reduce_op, group), own, call, group, op=op)
    ran(choice.plan_of())
    return total


def all_reduce_on_cuda(
    choice: Choice, where: Heap, tensors: tuple[Tensor, Tensor], reduce_op: str, op: str
) -> PreparedKernel:
    """Reduces the first of ``tensors`` into the second one, which it may be; both are contiguous. ``op``: whose call it
    is, for errors."""
    x, out = tensors
    with in_stream_order(x.device):
        prepared = prepare_all_reduce(choice, where, x, reduce_op)
        launch_exchange(prepared, op, where, (x,), (out,))
    return prepared


def _gradient(grad: Tensor, reduce_op: str, group_name: str, group_size: int | None) -> Any:
    return torch.ops.weft.one_shot_all_reduce(grad, reduce_op, group_name, group_size=group_size)


def _run_in_place(choice: Choice, where: Heap | None, call: AllReduceCall, group: ProcessGroup) -> None:
    x = call.x
    into = x if x.is_contiguous() else None
    result = run_by_choice(choice, where, call, group, into, IN_PLACE)
    if into is None:
        x.copy_(result)
    increment_version(x)  # as on the fast path


ALL_REDUCE: Op = Op(
    "one_shot_all_reduce(Tensor x, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    record=AllReduceCall,
    validate=_validate,
    fake=lambda call, group: torch.empty_like(call.x, memory_format=torch.contiguous_format),
    kernel="all_reduce",
    choose=lambda call, group: choose_sum(call.x, call.reduce_op, group),
    run=run_by_choice,
    known_by=lambda call: (call.reduce_op, [call.x]),
    kinds=KINDS,
    with_gradient=lambda call: OneTensorFunction.apply(ALL_REDUCE, _gradient, call, call.x),
    prepares=BOTH,
)
ALL_REDUCE_IN_PLACE = replace(
    ALL_REDUCE,
    schema="one_shot_all_reduce_(Tensor(a!) x, str reduce_op, str group_name, *, int? group_size=None) -> ()",
    validate=validate_in_place,
    fake=lambda *_: None,
    run=_run_in_place,
    with_gradient=" where it is overwritten; use one_shot_all_reduce",
    functional=(ALL_REDUCE, lambda call: call),
)
