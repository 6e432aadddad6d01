"""one_shot_all_reduce: from the op's tensor to a kernel's, and back.

A call of a size that was seen before costs the host no more than three look-ups and a launch: ``fast_all_reduce``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from ...kernels.all_reduce import host
from ...kernels.all_reduce.configs import AllReduceConfig, choose_all_reduce, estimate_all_reduce_us
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
from ..dispatch import plan, planning
from ..dispatch.fast_path import default_ns, may_take_fast_path, stream_workspace, timeout
from ..dispatch.plan import Plan, heap_or_reason, num_sms, ran
from ..dispatch.stream_order import StreamStep, in_stream_order, steps_on, stream_on
from ..dispatch.tensor_guards import TensorGuard, guards_of, likely_call, note_likely
from ..dispatch.workspaces import ALL_REDUCE as ALL_REDUCE_WORKSPACE
from ..dispatch.workspaces import all_reduce_workspace, matmul_workspace
from .op import Op, refuse_gradient, refuse_gradient_of_reduction

if TYPE_CHECKING:
    from ...kernels.all_reduce.cuda_kernel import AllReduceLauncher


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
class PreparedAllReduce:
    """What a workspace keeps for one number of elements, dtype and operation."""

    workspace: Workspace[Any]
    kernel: AllReduceLauncher
    plan: Plan
    timeout_ns: int  # where nobody has set another one


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
    behind: StreamStep


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
        try:
            if not x.is_contiguous() or not (address := x.data_ptr()):
                return None
        except RuntimeError:  # sparse, nested, of torch.func: without strides, or without memory
            return None
        device = cuda_state.state.index_of(x)
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
    if found.behind is not None:
        found.behind(stream)
    if out is x:
        increment_version(x)  # of what a kernel writes at an address autograd sees nothing
    return out


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
    before, behind = steps_on(device, stream)
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
        behind=behind,
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
    if not planning.is_planning() and fast_all_reduce(x, reduce_op, group.group_name, x, op) is not None:
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
    found = heap_or_reason(op, x, group, empty=x.numel() == 0)
    if not isinstance(found, str) and x.is_cuda and x.nbytes >= nccl_from():
        found = f"WEFT_NCCL_ALL_REDUCE_FROM is {nccl_from()} bytes"
    if isinstance(found, str):
        ran(Plan("unfused", found))
        result = reference_all_reduce(x, reduce_op, group)
        return result if out is None else out.copy_(result)
    source = x.contiguous()
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.device.type == "cpu":
        workspace = matmul_workspace(found, host.host_all_reduce_layout(x.nbytes, found.world_size))
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        host.host_all_reduce(workspace, source.view(-1), out.view(-1), reduce_op, op)
        return out
    _on_cuda(found, (source, out), reduce_op, config, op)
    return out


def _on_cuda(
    where: Heap, tensors: tuple[Tensor, Tensor], reduce_op: str, config: AllReduceConfig | None, op: str
) -> None:
    """Reduces the first of ``tensors`` into the second one, which it may be; both are contiguous."""
    x, out = tensors
    with in_stream_order(x.device):
        config = config or choose_all_reduce(x.nbytes, where.world_size, num_sms(x.device))
        # The ranks compile together: what a wait counts is not what a peer still compiles. Under one name: one may call
        # in place and another one not.
        key = (host.OP, config.form, x.dtype, reduce_op)
        where.prepare(host.OP, key, lambda: prepare_all_reduce(where, x, reduce_op, config))
        prepared = prepare_all_reduce(where, x, reduce_op, config)
        ran(prepared.plan)  # ranks may differ here: then nothing is launched, and nothing may be noted
        prepared.workspace.raise_if_broken(op, grids=prepared.kernel.grids)
        timeout_ns = timeout_in_ns(where.group_name)
        prepared.kernel.launch(x.data_ptr(), out.data_ptr(), timeout_ns, cuda_state.current_stream_of(x))


def prepare_all_reduce(
    where: Heap, x: Tensor, reduce_op: str, config: AllReduceConfig, kind: str = ALL_REDUCE_WORKSPACE
) -> PreparedAllReduce:
    """What the workspace of this kind keeps for such calls; made by all ranks together."""
    from ...kernels.all_reduce.cuda_kernel import AllReduceLauncher

    workspace = all_reduce_workspace(where, x.nbytes, config, kind)
    key: Any = (x.numel(), x.dtype, reduce_op)
    if config != choose_all_reduce(x.nbytes, where.world_size, num_sms(x.device)):
        key = (*key, config)
    found = workspace.prepared.get(key)
    if found is None:
        us = estimate_all_reduce_us(x.nbytes, where.world_size, config)
        plan = Plan("push", workspace_bytes=workspace.layout.bytes, predicted_us=us)
        planning.stop(plan)
        kernel = AllReduceLauncher(workspace, x.numel(), x.dtype, reduce_op, x.device, config)
        found = PreparedAllReduce(workspace, kernel, plan, default_ns())
        workspace.keep(key, found)
    return found


@cache
def nccl_from() -> float:
    """Bytes from which on the group's own collective is asked for.

    Raises:
        ValueError: WEFT_NCCL_ALL_REDUCE_FROM is not a number of bytes.
    """
    text = os.environ.get("WEFT_NCCL_ALL_REDUCE_FROM")
    if text is None:
        return float("inf")
    if not text.isdigit():
        raise ValueError(f"WEFT_NCCL_ALL_REDUCE_FROM: is {text!r}, must be a number of bytes")
    return int(text)


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


def _run_in_place(call: AllReduceCall, group: ProcessGroup) -> None:
    x = call.x
    if x.is_contiguous():
        run_all_reduce(x, call.reduce_op, group, x, op=host.IN_PLACE)
    else:
        x.copy_(run_all_reduce(x, call.reduce_op, group, op=host.IN_PLACE))
    increment_version(x)  # as on the fast path


ALL_REDUCE = Op(
    "one_shot_all_reduce(Tensor x, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    AllReduceCall,
    _validate,
    _fake,
    lambda call, group: run_all_reduce(call.x, call.reduce_op, group),
    lambda call: fast_all_reduce(call.x, call.reduce_op, call.group_name, anything=True),
    _with_gradient,
    lambda call: fast_all_reduce(call.x, call.reduce_op, call.group_name),
)
ALL_REDUCE_IN_PLACE = Op(
    "one_shot_all_reduce_(Tensor(a!) x, str reduce_op, str group_name, *, int? group_size=None) -> ()",
    AllReduceCall,
    validate_in_place,
    lambda *_: None,
    _run_in_place,
    lambda call: _fast_in_place(call, anything=True),
    lambda call: refuse_gradient(
        validate_in_place, call, " where it is overwritten; use one_shot_all_reduce"
    ),
    _fast_in_place,
    functional=(ALL_REDUCE, lambda call: call),
)
