"""all_gather_start, reduce_scatter_start and their waits: asynchronous collectives along dimension 0.

The pass puts them into graphs. Copy engines send, so a product that takes all SMs keeps none of them from running: a
kernel of NCCL, which becomes ready together with such a product, begins at its end.

A start gives a token, a tensor of no elements, which its wait takes. What is gathered with ``placed`` stays in the
buffer that it came to, until ``all_gather_release``; else the wait copies it. A buffer is a call's until then, and
there are two of each kind.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather.reference import as_bytes
from ...kernels.async_collectives import host
from ...symm_mem.heap.heap import Heap
from ..dispatch.plan import Plan, heap_or_reason, ran
from ..dispatch.workspaces import async_workspace
from .call import AsyncCall
from .on_cuda import fast_start, start_on_cuda
from .started import Started, free_buffer, started_in

_c10d = torch.ops._c10d_functional


def run_fast_start(call: AsyncCall) -> Tensor | None:
    """The token, if such a call was made before on CUDA; else None, and nothing happened."""
    started = fast_start(call)
    return None if started is None else _token(call.x, started)


def run_start(call: AsyncCall, group: ProcessGroup) -> Tensor:
    """The token of a call."""
    x, op = call.x, call.start
    found = heap_or_reason(op, x, group, empty=x.numel() == 0)
    if isinstance(found, str):
        started: Started | str = found
    elif x.device.type == "cpu":
        started = _on_cpu(found, call)
    else:
        started = start_on_cuda(found, call)
    if isinstance(started, str):
        ran(Plan("unfused", started))
        started = _unfused(call, group)
    return _token(x, started)


def run_wait(token: Tensor, call: AsyncCall) -> Tensor:
    """The result of the call that a token is of."""
    return _started(token, call.start).wait(call)


def run_release(token: Tensor, gathered: Tensor) -> None:
    """What ``all_gather_wait`` has returned is not read any more."""
    _started(token, "all_gather_start").release(gathered)


def _token(x: Tensor, started: Started) -> Tensor:
    token = x.new_empty(0)
    token._weft_started = started  # type: ignore[attr-defined]
    return token


def _started(token: Tensor, op: str) -> Started:
    started = getattr(token, "_weft_started", None)
    if not isinstance(started, Started):
        raise ValueError(f"started: is a tensor of {list(token.shape)}, must be what {op} has returned")
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


def _on_cpu(where: Heap, call: AsyncCall) -> Started:
    size, rank = where.world_size, where.rank
    layout = host.async_layout(call.part_bytes(size), size, call.placed)
    workspace = async_workspace(where, layout, call.workspace)
    buffer = free_buffer(started_in(workspace), call.start)
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
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
        return (torch.cat(typed) if call.gathers else host.reduced(typed, call.reduce_op)).view(shape)

    started = Started(call, finish, (lambda gathered: epoch.leave()) if call.placed else None)
    started.holds(workspace, buffer)
    return started
