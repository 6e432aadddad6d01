"""Calls of a process group between CPU ranks.

All that ranks do together before they exchange (the heap, the comparison of first calls, a workspace that grows) is
done where the call is made, as connections are elsewhere. The exchange itself may follow on another thread, one call
behind the other, on a workspace that only this group's calls use: so an asynchronous call waits for nobody.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather.host import host_all_gather, host_all_gather_layout
from ...kernels.all_reduce.host import host_all_reduce, host_all_reduce_layout
from ...kernels.reduce_scatter.host import host_reduce_scatter, host_reduce_scatter_layout
from ...symm_mem import flight_recorder
from ...symm_mem.call_site import Site, call_site, calling
from ...symm_mem.failure.call_log import poison_on_error
from ...symm_mem.layout import Layout
from ...symm_mem.timeouts import call_timeout
from ...symm_mem.workspace import Workspace
from ..dispatch.call_check import begin_call
from ..dispatch.plan import Plan, heap_or_reason, ran
from ..dispatch.workspaces import group_workspace
from .calls import ALL_GATHER, ALL_REDUCE, GroupCall, flat
from .work import DoneWork, HostWork


@dataclass(frozen=True, slots=True)
class HostExchange:
    """What is left of a call once the ranks are ready for it.

    Attributes:
        seconds: its deadline; None: the group's.
        site: where it was called.
        recorded: in the flight recorder.
    """

    workspace: Workspace[Layout]
    call: GroupCall
    seconds: float | None
    site: Site | None
    recorded: flight_recorder.RecordedCall | None

    def run(self) -> None:
        """On whichever thread."""
        exchange = {ALL_REDUCE: _all_reduce, ALL_GATHER: _all_gather}.get(self.call.name, _reduce_scatter)
        before, calling.site = calling.site, self.site
        flight_recorder.this_thread.call = self.recorded
        try:
            with call_timeout(self.seconds):
                _below_autograd(exchange, self.workspace, self.call)
            flight_recorder.end(flight_recorder.take_recorded())
        finally:
            calling.site = before


@poison_on_error
def prepare_on_host(group: ProcessGroup, call: GroupCall, seconds: float | None = None) -> HostExchange | str:
    """The exchange, or why the ranks cannot make it; the same on all of them. ``seconds``: its deadline."""
    x = call.x.detach()
    begin_call(call.name, group, x.device, dtype=x.dtype, elements=x.numel(), reduce_op=call.reduce_op)
    heap = heap_or_reason(call.name, x, group, empty=False)
    if isinstance(heap, str):
        return heap
    size = heap.world_size
    layout = {ALL_REDUCE: host_all_reduce_layout, ALL_GATHER: host_all_gather_layout}.get(call.name)
    wanted = layout(x.nbytes, size) if layout else host_reduce_scatter_layout(x.nbytes // size, size)
    workspace = group_workspace(heap, wanted)
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    return HostExchange(workspace, call, seconds, call_site(), flight_recorder.take_recorded())


@poison_on_error
def _below_autograd(run: Callable[..., None], workspace: Workspace[Layout], call: GroupCall) -> None:
    # A process group writes to what it is given, whatever autograd, or inference mode, say of that.
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        run(workspace, call)


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _all_reduce(workspace: Workspace[Layout], call: GroupCall) -> None:
    x = flat(call.x)  # in memory's order, as gloo does
    inside = x if x is not None else call.x.detach().contiguous().view(-1)
    host_all_reduce(workspace, inside, inside, call.reduce_op, call.name)
    if x is None:
        call.out.detach().copy_(inside.view(call.out.shape))


def _all_gather(workspace: Workspace[Layout], call: GroupCall) -> None:
    x = _elements(call.x)
    stacked = host_all_gather(workspace, x.view(torch.uint8), call.name)
    _write(call.out, stacked.view(-1).view(x.dtype))


def _reduce_scatter(workspace: Workspace[Layout], call: GroupCall) -> None:
    parts = _elements(call.x).view(workspace.world_size, -1)
    _write(call.out, host_reduce_scatter(workspace, parts, call.reduce_op, call.name))


def _elements(x: Tensor) -> Tensor:
    # In their order, as gloo takes them here, but for an all-reduce.
    return x.detach().contiguous().view(-1)


def _write(out: Tensor, elements: Tensor) -> None:
    out.detach().copy_(elements.view(out.shape))


_Task: TypeAlias = tuple[Sequence[HostExchange], HostWork]


class HostLine:
    """The calls of one group in their order: one at a time, those without a wait on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: HostWork | None = None
        self._lock = threading.Lock()

    def run(self, exchanges: Sequence[HostExchange], *, asynchronous: bool) -> DoneWork:
        written = [exchange.call.out for exchange in exchanges]
        if asynchronous:
            return self._submit(exchanges, written)
        last = self._last
        if last is not None and not last.is_completed():
            self._submit(exchanges, written).wait()
        else:
            for exchange in exchanges:
                exchange.run()
        return DoneWork(written)

    def _submit(self, exchanges: Sequence[HostExchange], written: list[Tensor]) -> HostWork:
        work = HostWork(written, exchanges[-1].workspace)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work_off, args=(self._tasks,), name=f"weft group {self._name}", daemon=True
                )
                self._thread.start()
            self._last = work
            self._tasks.put((exchanges, work))
        return work

    def end(self) -> None:
        """No call follows. What was begun comes to its end."""
        with self._lock:
            if self._thread is not None:
                self._tasks.put(None)
                self._thread = None


def _work_off(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        exchanges, work = task
        try:
            for exchange in exchanges:
                exchange.run()
        except BaseException as e:
            work.finish(e)
        else:
            work.finish()
        del task, exchanges, work  # the tensors are not kept until the next call
