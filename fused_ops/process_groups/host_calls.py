"""Calls of a process group between CPU ranks.

All that ranks do together before they exchange (the heap, the comparison of first calls, a workspace that grows) is
done where the call is made, as connections are elsewhere. The exchange itself may follow on another thread, one call
after the other, on a workspace that only this group's calls use: so an asynchronous call waits for nobody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather.reference import as_bytes
from ...kernels.device.collective.host_exchange import (
    exchange_layout,
    exchange_parts,
    gather,
    reduce_parts,
    reduce_scatter_parts,
)
from ...symm_mem import WeftError, flight_recorder, timeouts
from ...symm_mem.call_site import Site, call_site, calling, text
from ...symm_mem.failure.call_log import poison_on_error
from ...symm_mem.layout import Layout
from ...symm_mem.timeouts import call_timeout, get_timeout, thread_name
from ...symm_mem.workspace import Workspace
from ..dispatch.call_check import begin_call
from ..dispatch.plan import Plan, heap_or_reason, ran
from ..dispatch.workspaces import GROUP, workspace_of
from .calls import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, GroupCall, flat
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
        exchange = _EXCHANGES[self.call.name]
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
    begin_call(call.compared, group, x.device)
    heap = heap_or_reason(call.name, call.kernel, x.device, group, empty=False)
    if isinstance(heap, str):
        return heap
    size = heap.world_size
    # Of x, or of the part for each rank.
    nbytes = x.nbytes if call.name in (ALL_REDUCE, ALL_GATHER) else x.nbytes // size
    workspace = workspace_of(heap, GROUP, exchange_layout(nbytes, size))
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
    reduce_parts(workspace, [inside] * workspace.world_size, inside, call.reduce_op, call.name)
    if x is None:
        call.out.detach().copy_(inside.view(call.out.shape))


def _all_gather(workspace: Workspace[Layout], call: GroupCall) -> None:
    x = call.x.detach().contiguous()
    _write(call.out, gather(workspace, as_bytes(x), call.name).view(x.dtype))


def _reduce_scatter(workspace: Workspace[Layout], call: GroupCall) -> None:
    parts = call.x.detach().contiguous().view(workspace.world_size, -1).unbind()
    _write(call.out, reduce_scatter_parts(workspace, parts, call.reduce_op, call.name))


def _all_to_all(workspace: Workspace[Layout], call: GroupCall) -> None:
    x = call.x.detach().contiguous()
    parts = as_bytes(x).view(workspace.world_size, -1)
    _write(call.out, exchange_parts(workspace, parts, call.name).view(-1).view(x.dtype))


_EXCHANGES = {
    ALL_REDUCE: _all_reduce,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
}


def _write(out: Tensor, elements: Tensor) -> None:
    out.detach().copy_(elements.view(out.shape))


_Task: TypeAlias = tuple[Sequence[HostExchange], HostWork]

_LINGERS = 10.0  # seconds for which a thread without a call waits for the next one
_CALLED = 0  # no thread's number


class HostLine:
    """The calls of one group in their order, one at a time, whichever threads make them.

    A thread of the line's own carries out those without a wait. Before it tells of a call's end it hands the line to
    another thread: callbacks may make calls, too, and wait for them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[_Task] = deque()
        self._turn = threading.Condition()
        self._by: int | None = None  # the thread that carries out calls; _CALLED: one that is about to
        self._running: HostExchange | None = None
        self._since = 0.0  # that one has begun, or a thread was called
        self._idle = 0
        self._ended = False

    def run(self, exchanges: Sequence[HostExchange], *, asynchronous: bool) -> DoneWork:
        written = [exchange.call.out for exchange in exchanges]
        if asynchronous:
            return self._submit(exchanges, written)
        if self._by == threading.get_ident():
            raise self._waits_for_itself(exchanges[0].call.name)
        begun = False
        try:
            begun = self._takes_turn()
            for exchange in exchanges if begun else ():
                self._carry_out(exchange)
        finally:
            self._hand_on()
        if not begun:
            self._submit(exchanges, written).wait()
        return DoneWork(written)

    def end(self) -> None:
        """No call follows. What was begun comes to its end."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def why_stuck(self, name: str) -> WeftError | None:
        """What a thread is told that waits for a call of this ``name``, if the line does not get to it: each wait for
        another rank has a deadline, so whoever carries out a call comes to the next wait, or to an end."""
        running, by, since = self._running, self._by, self._since
        if by == threading.get_ident():
            return self._waits_for_itself(name)
        seconds = None
        if running is not None:
            since, seconds = max(since, running.workspace.lock.since), running.seconds
        waited = time.monotonic() - since
        if waited < (get_timeout(self._name) if seconds is None else seconds) + timeouts.GRACE:
            return None
        said = "is to carry it out and has not begun"
        if running is not None:
            said = f"carries out {running.call.name} (called at {text(running.site)}) and does not go on"
        return WeftError(
            f"{name} in group {self._name!r}: waited {waited:.0f} s for {thread_name(by)} of this rank, which {said}"
        )

    def _waits_for_itself(self, name: str) -> WeftError:
        said = "another call"
        if (running := self._running) is not None:
            said = f"{running.call.name} (called at {text(running.site)})"
        return WeftError(
            f"{name} in group {self._name!r}: {thread_name(threading.get_ident())} of this rank would wait for itself: "
            f"it is carrying out {said}, and only then comes to this one"
        )

    def _takes_turn(self) -> bool:
        """Whether no call comes first: this thread then carries out its own, until it hands on."""
        with self._turn:
            if self._by is not None:
                return False
            self._by = threading.get_ident()
            return True

    def _hand_on(self) -> None:
        """If it is this thread's turn, it is that of the next call."""
        with self._turn:
            if self._by == threading.get_ident():
                self._by = None
                self._call_thread()

    def _carry_out(self, exchange: HostExchange) -> None:
        self._running, self._since = exchange, time.monotonic()
        try:
            exchange.run()
        finally:
            self._running = None

    def _submit(self, exchanges: Sequence[HostExchange], written: list[Tensor]) -> HostWork:
        last = exchanges[-1]
        name = last.call.name
        work = HostWork(written, last.workspace, lambda: self.why_stuck(name))
        with self._turn:
            self._tasks.append((exchanges, work))
            try:
                self._call_thread()
            except BaseException:  # there can be no more threads
                self._by = None
                self._tasks.pop()
                raise
        return work

    def _call_thread(self) -> None:
        """There is one for what is to be done."""
        if self._by is None and self._tasks:
            self._by, self._since = _CALLED, time.monotonic()
            if self._idle:
                self._turn.notify()
            else:
                threading.Thread(target=self._work_off, name=f"weft group {self._name}", daemon=True).start()

    def _next(self) -> _Task | None:
        me = threading.get_ident()
        with self._turn:
            if self._by == me and not self._tasks:
                self._by = None
            while self._by not in (me, _CALLED):
                if self._ended:
                    return None
                self._idle += 1
                called = self._turn.wait(_LINGERS)
                self._idle -= 1
                if not called and self._by != _CALLED:
                    return None
            self._by = me
            return self._tasks.popleft()

    def _work_off(self) -> None:
        while (task := self._next()) is not None:
            exchanges, work = task
            error = None
            try:
                for exchange in exchanges:
                    self._carry_out(exchange)
            except BaseException as e:
                error = e
            work.finish(error, self._hand_on)
            del task, exchanges, work, error  # the tensors are not kept until the next call
