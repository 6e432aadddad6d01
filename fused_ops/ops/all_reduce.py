"""one_shot_all_reduce: from the op's tensor to a kernel's, and back.

A call of a size that was seen before costs the host no more than three look-ups and a launch: ``fast_all_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from ...kernels.all_reduce import host
from ...kernels.all_reduce.configs import AllReduceConfig
from ...kernels.all_reduce.reference import reference_all_reduce
from ...kernels.device.jit.empty import Empty, empty_on
from ...symm_mem import call_cache, flight_recorder, resolve_group
from ...symm_mem.backends import cuda_state
from ...symm_mem.failure.call_log import Grids, running
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import GroupRef, has_name
from ...symm_mem.timeouts import timeout_in_ns
from ...symm_mem.workspace import Workspace
from .. import validation
from ..dispatch import plan
from ..dispatch.all_reduces import PreparedAllReduce, choose_sum, choose_sum_on_cuda, prepare_all_reduce
from ..dispatch.choice import Choice, unfused
from ..dispatch.fast_path import may_take_fast_path, run_fast, stream_workspace, timeout
from ..dispatch.plan import Plan, heap_or_reason, ran
from ..dispatch.stream_order import StreamStep, in_stream_order, steps_on, stream_on
from ..dispatch.tensor_guards import TensorGuard, guards_of, likely_call, note_likely
from ..dispatch.workspaces import ALL_REDUCE as ALL_REDUCE_WORKSPACE
from .op import Op, refuse_gradient, refuse_gradient_of_reduction

BOTH = (host.OP, host.IN_PLACE)  #: the ops that are prepared with each other


class AllReduceCall(NamedTuple):
    """Also of an all-reduce in place."""

    x: Tensor
    reduce_op: str
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x]


def _validate(call: AllReduceCall) -> tuple[AllReduceCall, ProcessGroup]:
    group = resolve_group(call.group_name)
    validation.float_dtype("x", call.x)
    validation.reduction(call.reduce_op, validation.ALL_REDUCE_OPS)
    return call, group


def validate_in_place(call: AllReduceCall) -> tuple[AllReduceCall, ProcessGroup]:
    validation.overwritten("x", call.x)
    return _validate(call)


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding: how x of one shape is reduced, into what, and until when."""

    group: GroupRef
    workspace: Workspace[Any]
    launch: Callable[[int, int, int, int], None]
    grids: Grids
    plan: Plan
    timeout_ns: int
    alike: TensorGuard
    device: int
    stream: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    shape: flight_recorder.CallShape
    empty: Empty
    before: StreamStep
    after: StreamStep


def fast_all_reduce(
    x: Tensor,
    reduce_op: str,
    group_name: str,
    out: Tensor | None = None,
    op: str = host.OP,
    *,
    anything: bool = False,
) -> Tensor | None:
    """The result, if x is a contiguous CUDA tensor and such a call was made before; else None, and nothing happened.

    fast_path.py says what is looked at each time, and why.

    Args:
        op: whose call it is, for errors.
        anything: x may be what a kernel must not see yet (``may_take_fast_path``).
    """
    kept, where = call_cache.cached_calls, plan.this_thread.workspaces
    kind = (host.OP, reduce_op, group_name, where)
    found: _Found | None = likely_call(kept, kind, (x,))
    address = 0 if found is None else x.data_ptr()
    if found is None or not address:
        if anything and not may_take_fast_path(x):
            return None
        device = cuda_state.state.index_of(x)
        if device < 0:
            return _between_cpu_ranks(x, reduce_op, group_name, out, op)
        try:
            if not x.is_contiguous() or not (address := x.data_ptr()):
                return None
        except RuntimeError:  # sparse, nested, of torch.func: without strides, or without memory
            return None
        stream = stream_on(device)
        if stream is None:
            return None
        key = (host.OP, x.shape, x.dtype, reduce_op, device, stream, group_name, where)
        found = kept.get(key)
        if found is None:
            found = _find(x, reduce_op, group_name, stream)
            if found is None:
                return None
            call_cache.keep(kept, key, found)
        note_likely(kept, kind, found)
    if not has_name(found.group(), group_name):
        return None
    if out is x and x.is_inference() and not torch.is_inference_mode_enabled():
        return None  # is refused
    stream = found.stream
    if out is None:
        out = found.empty(found.sizes, found.strides, found.dtype)
    to = address if out is x else out.data_ptr()
    workspace = found.workspace
    if found.before is not None:
        found.before(stream)
    workspace.raise_if_broken(op, 1, found.grids)
    plan.this_thread.plan = found.plan
    try:
        found.launch(address, to, found.timeout_ns, stream)
    except BaseException as e:
        workspace.abandon(e)  # the peers may wait for what was not launched
        raise
    if flight_recorder.calls is not None and not running.inside:  # not one that is part of another op's
        workspace.record_launch(op, found.shape)
    if found.after is not None:
        found.after(stream)
    if out is x:
        increment_version(x)  # of what a kernel writes at an address autograd sees nothing
    return out


def _between_cpu_ranks(
    x: Tensor, reduce_op: str, group_name: str, out: Tensor | None, op: str
) -> Tensor | None:
    if out is not None and x.is_inference() and not torch.is_inference_mode_enabled():
        return None  # is refused
    results = run_fast(op, reduce_op, (x,), group_name)
    return None if results is None else (out if results == [] else results[0])


def _find(x: Tensor, reduce_op: str, group_name: str, stream: int) -> _Found | None:
    """What was prepared for such calls, where they are made now."""
    made = _made_on(x, reduce_op, group_name, stream)
    if made is None:
        return None
    group, found = made
    deadline, sizes, device = (
        timeout(group_name, found.timeout_ns),
        tuple(x.shape),
        cuda_state.state.index_of(x),
    )
    strides = torch.empty(sizes, device="meta").stride()
    before, after = steps_on(device, stream)
    return _Found(
        *(group, found.workspace, found.kernel.launch, found.kernel.grids, found.plan, deadline),
        alike=guards_of([x]),
        device=device,
        stream=stream,
        sizes=sizes,
        strides=strides,
        dtype=x.dtype,
        shape=flight_recorder.CallShape(flight_recorder.REDUCE, sizes, x.dtype, "cuda"),
        empty=empty_on(x.device),
        before=before,
        after=after,
    )


def made_before(x: Tensor, reduce_op: str, group_name: str) -> PreparedAllReduce | None:
    """What such calls, also of other shapes, are made with on the current stream; None where they take the slow
    path."""
    stream = stream_on(cuda_state.state.index_of(x))
    made = None if stream is None else _made_on(x, reduce_op, group_name, stream)
    return None if made is None else made[1]


def _made_on(
    x: Tensor, reduce_op: str, group_name: str, stream: int
) -> tuple[GroupRef, PreparedAllReduce] | None:
    here = stream_workspace(ALL_REDUCE_WORKSPACE, group_name, cuda_state.state.index_of(x), stream)
    found = None if here is None else here.workspace.prepared.get((x.numel(), x.dtype, reduce_op))
    return None if here is None or found is None else (here.group, found)


def in_place(x: Tensor, reduce_op: str, group: ProcessGroup, op: str) -> Tensor:
    """x, contiguous, overwritten. ``op``: whose call it is, for errors."""
    if fast_all_reduce(x, reduce_op, group.group_name, x, op) is not None:
        return x
    return run_all_reduce(x, reduce_op, group, x, op=op)


def run_all_reduce(
    x: Tensor,
    reduce_op: str,
    group: ProcessGroup,
    out: Tensor | None = None,
    config: AllReduceConfig | None = None,
    op: str = host.OP,
) -> Tensor:
    """As the op; the arguments are checked.

    Args:
        out: contiguous, like x, and may be x.
        op: whose call it is, for errors.
    """
    call = AllReduceCall(x, reduce_op, group.group_name)
    where = heap_or_reason(op, "all_reduce", x.device, group, empty=x.numel() == 0)
    if isinstance(where, str):
        return run_by_choice(unfused(where), None, call, group, out, op)
    choice = choose_sum(x, reduce_op, group)
    if config is not None and choice.algorithm == "push":
        choice = choose_sum_on_cuda(x, reduce_op, group, config)
    return run_by_choice(choice, where, call, group, out, op)


def run_by_choice(
    choice: Choice,
    where: Heap | None,
    call: AllReduceCall,
    group: ProcessGroup,
    out: Tensor | None = None,
    op: str = host.OP,
) -> Tensor:
    """As the op, by a choice; ``op``: whose call it is, for errors."""
    x, reduce_op = call.x, call.reduce_op
    if where is None or choice.is_unfused:
        ran(choice.plan_in(None))
        result = reference_all_reduce(x, reduce_op, group)
        return result if out is None else out.copy_(result)
    source = x.contiguous()
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if choice.algorithm == "host":
        workspace = choice.workspace_on(where)
        ran(choice.plan_in(workspace))
        host.host_all_reduce(workspace, source.view(-1), out.view(-1), reduce_op, op)
        return out
    _on_cuda(choice, where, (source, out), reduce_op, op)
    return out


def _on_cuda(choice: Choice, where: Heap, tensors: tuple[Tensor, Tensor], reduce_op: str, op: str) -> None:
    """Reduces the first of ``tensors`` into the second one, which it may be; both are contiguous."""
    x, out = tensors
    with in_stream_order(x.device):
        prepared = prepare_all_reduce(choice, where, x, reduce_op)
        ran(prepared.plan)  # ranks may differ here: then nothing is launched, and nothing may be noted
        prepared.workspace.raise_if_broken(op, grids=prepared.kernel.grids)
        timeout_ns = timeout_in_ns(where.group_name)
        prepared.kernel.launch(x.data_ptr(), out.data_ptr(), timeout_ns, cuda_state.current_stream_of(x))


class AllReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllReduceCall, x: Tensor) -> Tensor:
        ctx.reduce_op, ctx.group_name, ctx.group_size = call.reduce_op, call.group_name, call.group_size
        done: Tensor = ALL_REDUCE.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = torch.ops.weft.one_shot_all_reduce(
            grad, ctx.reduce_op, ctx.group_name, group_size=ctx.group_size
        )
        return None, total


def _with_gradient(call: AllReduceCall) -> Any:
    refuse_gradient_of_reduction(call.reduce_op)
    return AllReduceFunction.apply(call, call.x)


def _fake(call: AllReduceCall, group: ProcessGroup) -> Tensor:
    return torch.empty_like(call.x, memory_format=torch.contiguous_format)


def _fast_in_place(call: AllReduceCall, *, anything: bool = False) -> Tensor | None:
    x, reduce_op, group_name, _ = call
    return fast_all_reduce(x, reduce_op, group_name, x, host.IN_PLACE, anything=anything)


def _run_in_place(choice: Choice, where: Heap | None, call: AllReduceCall, group: ProcessGroup) -> None:
    x = call.x
    into = x if x.is_contiguous() else None
    result = run_by_choice(choice, where, call, group, into, host.IN_PLACE)
    if into is None:
        x.copy_(result)
    increment_version(x)  # as on the fast path


def _sends_nothing(call: AllReduceCall, group: ProcessGroup) -> bool:
    return call.x.numel() == 0


def _choose(call: AllReduceCall, group: ProcessGroup) -> Choice:
    return choose_sum(call.x, call.reduce_op, group)


ALL_REDUCE = Op(
    "one_shot_all_reduce(Tensor x, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    record=AllReduceCall,
    validate=_validate,
    fake=_fake,
    kernel="all_reduce",
    sends_nothing=_sends_nothing,
    choose=_choose,
    run=run_by_choice,
    fast=lambda call: fast_all_reduce(call.x, call.reduce_op, call.group_name, anything=True),
    known_by=lambda call, group: (call.reduce_op, [call.x]),
    with_gradient=_with_gradient,
    fast_on_device=lambda call: fast_all_reduce(call.x, call.reduce_op, call.group_name),
    prepares=BOTH,
)
ALL_REDUCE_IN_PLACE = Op(
    "one_shot_all_reduce_(Tensor(a!) x, str reduce_op, str group_name, *, int? group_size=None) -> ()",
    record=AllReduceCall,
    validate=validate_in_place,
    fake=lambda *_: None,
    kernel="all_reduce",
    sends_nothing=_sends_nothing,
    choose=_choose,
    run=_run_in_place,
    fast=lambda call: _fast_in_place(call, anything=True),
    known_by=lambda call, group: (call.reduce_op, [call.x]),
    with_gradient=lambda call: refuse_gradient(
        validate_in_place, call, " where it is overwritten; use one_shot_all_reduce"
    ),
    fast_on_device=_fast_in_place,
    functional=(ALL_REDUCE, lambda call: call),
    prepares=BOTH,
)
