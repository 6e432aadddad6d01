"""all_gather_start, reduce_scatter_start and their waits: asynchronous collectives along dimension 0, and what
torch.library is told of them. Graphs of the pass have them, users do not.

Copy engines send, so a product that takes all SMs keeps none of them from running: a kernel of NCCL, which becomes
ready together with such a product, begins at its end.

A start gives a token, a tensor of no elements, which its wait takes. What is gathered with ``placed`` stays in the
buffer that it came to, until ``all_gather_release``; else the wait copies it. A buffer is a call's until then, and
there are two of each kind. A wait takes x along with the token: until then x is read, so nothing may overwrite it or
take its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed import ProcessGroup

from ...kernels.all_gather.reference import as_bytes
from ...kernels.async_collectives import host
from ...kernels.device.collective.host_exchange import reduced
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.call_check import OpCall, begin_call
from ..dispatch.choice import CHOOSERS, Choice, unfused
from ..dispatch.launch_cache import launch_again
from ..dispatch.plan import heap_or_reason, ran, why_runs_unfused
from ..library import group_checks, schema
from ..library.implement import implement
from ..ops import ALL_GATHER, REDUCE_SCATTER
from ..ops.all_gather import AllGatherCall
from ..ops.op import with_poison
from ..ops.reduce_scatter import ReduceScatterCall
from .call import KINDS, AsyncCall, Started, free_buffer, hold_started
from .on_cuda import choose_async, start_on_cuda

GATHER, SCATTER = "all_gather", "reduce_scatter"
KERNEL = "async_collectives"
_c10d = torch.ops._c10d_functional


def fast_start(call: AsyncCall) -> Tensor | None:
    """The token, if such a call was made before on CUDA; else None, and nothing happened."""
    arguments = call.reduce_op, call.placed, call.group_size
    done = launch_again(f"{call.kind}_start", arguments, (call.x,), call.group_name, KINDS)
    return None if done is None else done[0]


def _choose(call: AsyncCall, group: ProcessGroup) -> Choice:
    if call.x.device.type != "cpu":
        return choose_async(call, group.size())
    layout = host.async_layout(call.part_bytes(group.size()), group.size(), call.placed)
    return Choice("host", kind=call.workspace, layout=layout)


def run_wait(token: Tensor, call: AsyncCall) -> Tensor:
    """The result of the call that a token is of."""
    return _started(token, call.kind).wait(call)


def run_release(token: Tensor, gathered: Tensor) -> None:
    """What ``all_gather_wait`` has returned is not read any more."""
    _started(token, "all_gather").release(gathered)


def _started(token: Tensor, kind: str) -> Started:
    started = getattr(token, "_weft_started", None)
    if not isinstance(started, Started):
        raise ValueError(
            f"started: is a tensor of {list(token.shape)}, must be what {kind}_start has returned"
        )
    return started


def _unfused(call: AsyncCall, group: ProcessGroup) -> Started:
    """By the group's own backend where it is waited for: on its way beside weft's kernels it might find no SM free, and
    keep those of the peers waiting."""
    x, size, name = call.x.contiguous(), group.size(), group.group_name

    def finish() -> Tensor:
        if call.gathers:
            pending = _c10d.all_gather_into_tensor(x, size, name)
        else:
            pending = _c10d.reduce_scatter_tensor(x, call.reduce_op, size, name)
        return _c10d.wait_tensor(pending)

    return Started(call, finish)


def _on_cpu(choice: Choice, where: Heap, call: AsyncCall) -> Started:
    size, rank = where.world_size, where.rank
    workspace = choice.workspace_on(where)
    buffer = free_buffer(workspace.started, call.start)
    ran(choice.plan_of(workspace.layout))
    x = call.x.contiguous()
    parts = [as_bytes(x)] * size if call.gathers else list(as_bytes(x).chunk(size))
    epoch = host.send(workspace, buffer, parts, call.start, with_own=call.placed)
    epoch.op = call.wait
    shape, dtype = call.result_shape(size), x.dtype

    def finish() -> Tensor:
        if call.placed:
            host.arrive(workspace, epoch)
            return workspace.buffer(rank, buffer, tuple(shape), dtype)
        typed = [part.view(dtype) for part in host.received(workspace, epoch, parts[rank])]
        made = torch.cat(typed) if call.gathers else reduced(typed, call.reduce_op).to(dtype)
        return made.view(shape)

    started = Started(call, finish, (lambda gathered: epoch.leave()) if call.placed else None)
    started.holds(workspace, buffer)
    return started


def _checked(call: AsyncCall) -> ProcessGroup:
    """The group of a call that is right."""
    if call.group_size is not None:
        group_checks.group_size(call.group_size, call.group_name)
    if call.gathers:
        return ALL_GATHER.validate(AllGatherCall(call.x, 0, call.group_name))[1]
    validation.reduction(call.reduce_op)
    scatters = ReduceScatterCall(call.x, call.reduce_op, 0, call.group_name)
    return REDUCE_SCATTER.validate(scatters)[1]


def _fake_start(call: AsyncCall) -> Tensor:
    _checked(call)
    return call.x.new_empty(0)


def _choice(call: AsyncCall) -> tuple[Choice, torch.device]:
    """As ``Op.choice_of``."""
    group, device = _checked(call), call.x.device
    reason = why_runs_unfused(KERNEL, device, group, empty=call.x.numel() == 0)
    return (_choose(call, group) if reason is None else unfused(reason)), device


def _start(call: AsyncCall) -> Tensor:
    if (token := fast_start(call)) is not None:
        return token
    return _slow_start(call)


@with_poison
def _slow_start(call: AsyncCall) -> Tensor:
    group, x = _checked(call), call.x
    given: dict[str, object] = {"x": x} | (
        {"placed": call.placed} if call.gathers else {"reduce_op": call.reduce_op}
    )
    begin_call(OpCall(call.start, given, x.device.type), group, x.device)
    where = heap_or_reason(call.start, KERNEL, x.device, group, empty=x.numel() == 0)
    choice = unfused(where) if isinstance(where, str) else _choose(call, group)
    if isinstance(where, str) or choice.is_unfused:
        ran(choice.plan_of())
        started = _unfused(call, group)
    else:
        started = (_on_cpu if choice.algorithm == "host" else start_on_cuda)(choice, where, call)
    token = x.new_empty(0)
    hold_started(token, started)
    return token


def _fake_wait(token: Tensor, call: AsyncCall) -> Tensor:
    return call.x.new_empty(call.result_shape(_checked(call).size()))


def _starts(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A start as torch calls it."""

    def start(x: Tensor, *args: str, placed: bool = False, group_size: int | None = None) -> Any:
        return run(AsyncCall(kind, x, args[0] if len(args) > 1 else "", args[-1], placed, group_size))

    return start


def _waits(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A wait, which takes what the start has made."""

    def wait(
        started: Tensor, x: Tensor, group_name: str, *, placed: bool = False, group_size: int | None = None
    ) -> Any:
        return run(started, AsyncCall(kind, x, "sum", group_name, placed, group_size))

    return wait


for _op, _run, _fake in (
    (schema.all_gather_start, _starts(GATHER, _start), _starts(GATHER, _fake_start)),
    (schema.all_gather_wait, _waits(GATHER, run_wait), _waits(GATHER, _fake_wait)),
    (schema.all_gather_release, lambda started, x, *_, **__: run_release(started, x), lambda *_, **__: None),
    (schema.reduce_scatter_start, _starts(SCATTER, _start), _starts(SCATTER, _fake_start)),
    (schema.reduce_scatter_wait, _waits(SCATTER, run_wait), _waits(SCATTER, _fake_wait)),
):
    implement(_op, _run, _fake)
    fx.node.has_side_effect(_op)
CHOOSERS[schema.all_gather_start] = _starts(GATHER, _choice)
CHOOSERS[schema.reduce_scatter_start] = _starts(SCATTER, _choice)
