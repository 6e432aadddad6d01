"""Calls of a process group on CUDA, by weft's kernels.

A call runs on the caller's current stream. One with ``async_op=True`` runs on a stream of the group's own, after the
work that the current stream has by then, as NCCL's. Ranks need not call on the same streams, so all calls use one
workspace and run one after the other, as NCCL's do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ...kernels.device.jit.empty import empty_on
from ...symm_mem import call_cache, flight_recorder, forks, is_checked
from ...symm_mem.backends import cuda_state
from ...symm_mem.failure.call_log import TimedName, poison_on_error
from ...symm_mem.heap.heap import Heap
from ..dispatch.all_reduces import choose_sum_on_cuda, prepare_all_reduce
from ..dispatch.call_check import begin_call
from ..dispatch.launch_cache import (
    Launch,
    PreparedKernel,
    PreparedLaunch,
    default_ns,
    launch_on_stream,
    overlap,
    timeout,
)
from ..dispatch.plan import Plan, heap_or_reason, ran
from ..dispatch.stand_alone import StandAlone, choose_alone, prepare_alone
from ..dispatch.stream_order import (
    CallLine,
    StreamStep,
    in_stream_order,
    is_external,
    steps_on,
    stream_and_graph,
)
from ..dispatch.workspaces import GROUP
from .calls import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, GroupCall, flat, index_of
from .work import DoneWork, StreamWork


class _Side:
    """The stream of a group's asynchronous calls on one device."""

    def __init__(self, device: int) -> None:
        self.stream, self._begins = cuda_state.state.side_stream(device), cuda_state.state.event()
        self._device = device

    def wait(self, stream: int) -> None:
        """What follows on it comes after what ``stream`` has now."""
        self._begins.record(cuda_state.state.stream(stream, self._device))
        self._begins.wait(self.stream)

    def work(self, written: list[Tensor], read: list[Tensor]) -> StreamWork:
        """Of the calls that it has now."""
        ended = cuda_state.state.event()
        ended.record(self.stream)
        return StreamWork(written, read, ended, self.stream)


class DeviceLines:
    """The calls of one group on this process's GPUs."""

    def __init__(self, group: ProcessGroup, group_name: str) -> None:
        self._group, self._rank = weakref.ref(group), group.rank()
        self._name = group_name
        self._others: weakref.ref[Work] | None = None
        self._launched = 0
        # Device and stream that wait for so many of them, or more: another thread may launch one meanwhile.
        self._ordered: tuple[int, int, int] | None = None
        self._lines: dict[int, CallLine] = {}  # of each device, outside of graphs
        self._captured: dict[int, CallLine] = {}
        self._sides: dict[int, _Side] = {}
        self._lock = threading.RLock()  # calls of one group are launched by one thread at a time

    def run(
        self, calls: list[GroupCall], *, asynchronous: bool, seconds: float | None = None
    ) -> DoneWork | str:
        """The work, or why no kernel takes the calls; the same on all ranks. ``seconds``: their deadline."""
        written = [call.out for call in calls]
        with self._lock:
            if not asynchronous:
                why = self._launch_all(calls, seconds)
                return DoneWork(written) if why is None else why
            index = index_of(calls[0].x)
            side = self._sides.get(index) or self._sides.setdefault(index, _Side(index))
            current = cuda_state.state.current_stream(index)
            with cuda_state.state.make_stream_current(side.stream):
                side.wait(current)
                why = self._launch_all(calls, seconds)
            if why is not None:
                return why
            return side.work(written, [call.x for call in calls if call.x is not call.out])

    def _launch_all(self, calls: list[GroupCall], seconds: float | None) -> str | None:
        if self._others is not None:
            work, self._others = self._others(), None
            if work is not None and not cuda_state.state.is_capturing():
                work.wait()
        # What a call is left for depends on its size alone: if any is left the largest is, before one is launched.
        for i, call in enumerate(sorted(calls, key=lambda call: -call.x.nbytes)):
            # Cached calls have the group's deadline.
            if seconds is None and self.launch_again(call.name, call.x, call.out, call.reduce_op):
                continue
            if (why := self._launch_first(call, seconds)) is not None:
                assert i == 0
                return why
        return None

    def order_after(self, device: torch.device) -> None:
        """The current stream waits for the group's calls."""
        index = device.index
        line = self._lines.get(index)
        if line is None or cuda_state.state.is_capturing():
            return
        stream = cuda_state.state.current_stream(index)
        now = index, stream, self._launched
        if self._ordered != now or is_external(stream, index):
            line.wait(stream)
            self._ordered = now

    def order_before(self, work: Work | None) -> None:
        """weft's next call waits for this work of the group's own backend, if it is still referenced then."""
        if work is not None and not cuda_state.state.is_capturing():
            self._others = weakref.ref(work)

    def _line_of(self, index: int, graph: int) -> CallLine:
        if not graph:
            return self._lines.setdefault(index, CallLine())
        line = self._captured.setdefault(index, CallLine())
        if line.graph != graph:
            line.begins(graph)
        return line

    def launch_again(
        self, name: str, x: Tensor, out: Tensor, reduce_op: str, asynchronous: bool = False
    ) -> StreamWork | bool:
        """Launches a call if such a one was made before, on the current stream, or ``asynchronous``. The tensors are
        torch's own, and anything else than that may be wrong with them.

        Returns:
            the work of an asynchronous call, else True; False if nothing was launched.
        """
        cuda = cuda_state.state
        index = cuda.index_of(x)
        side = self._sides.get(index) if asynchronous else None
        if asynchronous and side is None:
            return False
        # As ``stream_on``, whose call takes as long as it does.
        if forks.inherited or cuda.current_device() != index or cuda.is_capturing():
            return False
        current = cuda.current_stream(index)
        stream = current if side is None else side.stream.cuda_stream
        # By itself, not by its name: that may be another group's later.
        key: tuple[Hashable, ...]
        if x is out:
            key = self, name, reduce_op, x.numel(), x.dtype, index, stream
        else:
            key = self, name, reduce_op, x.numel(), x.dtype, index, stream, out.numel(), out.dtype
        launch: Launch | None = call_cache.cached_calls.get(key)
        if launch is None or not x.is_contiguous() or self._others is not None:
            return False
        if x is not out:
            if cuda.index_of(out) != index or not out.is_contiguous():
                return False
            if overlap(out, x) and not _is_own_part(name, x, out, self._rank):
                return False
        with self._lock:
            if side is not None:
                side.wait(current)
            given = (x,)
            if launch(name, given, given if x is out else (out,)) is None:
                return False
            self._launched += 1
            return True if side is None else side.work([out], [] if x is out else [x])

    @poison_on_error
    def _launch_first(self, call: GroupCall, seconds: float | None) -> str | None:
        group = self._group()
        assert group is not None  # it is the caller
        x, out = flat(call.x), flat(call.out)
        assert x is not None and out is not None  # what is not dense NCCL refuses
        begin_call(call.compared, group, x.device)
        heap = heap_or_reason(call.name, call.kernel, x.device, group, empty=False)
        if isinstance(heap, str):
            ran(Plan("unfused", heap))
            return heap
        kept, index = call_cache.cached_calls, index_of(x)
        with in_stream_order(x.device):
            stream, graph = stream_and_graph(x.device)
            external = is_external(stream, index)
            prepared = _kernel_of(heap, call, x, out, group)
            if isinstance(prepared, str):
                ran(Plan("unfused", prepared))
                return prepared
            workspace, kernel, ran_by, _ = prepared
            line = self._line_of(index, graph)
            if external:
                line.wait(stream)
            else:
                line.alone(stream, 1)
            if call.x is not call.out and overlap(out, x) and not _is_own_part(call.name, x, out, heap.rank):
                x = x.clone()
            name, ns = call.name, (deadline := timeout(self._name, default_ns()))
            if seconds is not None:
                name, ns = TimedName(call.name, seconds), int(seconds * 1e9)
            workspace.raise_if_broken(name, grids=kernel.grids)
            kernel.launch(0, (x.data_ptr(),), (out.data_ptr(),), ns, stream)
            if external:
                line.end(stream, external=True)
            self._launched += 1
        if not graph and not external and not is_checked():
            kind = flight_recorder.collective_of(call.name)
            shape = flight_recorder.CallShape(kind, (x.numel(),), x.dtype, "cuda")
            how = PreparedLaunch(kernel, False, (), empty_on(x.device), kernel.grids, shape)
            before, after = steps_on(index, stream)
            on = stream, _then(before, line), after
            launch = launch_on_stream(workspace, how, ran_by, deadline, on, is_double_buffered=False)
            key: tuple[Hashable, ...] = self, call.name, call.reduce_op, x.numel(), x.dtype, index, stream
            if call.x is not call.out:
                key = *key, out.numel(), out.dtype
            call_cache.keep(kept, key, launch)
        return None


def _then(before: StreamStep, line: CallLine) -> StreamStep:
    """``before``, and then the group's calls that come first."""

    def step(stream: int) -> None:
        if before is not None:
            before(stream)
        if line.last is not None or stream not in line.streams:
            line.alone(stream, 1)

    return step


def _is_own_part(name: str, x: Tensor, out: Tensor, rank: int) -> bool:
    whole, part = (out, x) if name == ALL_GATHER else (x, out)
    return name != ALL_TO_ALL and part.data_ptr() == whole.data_ptr() + rank * part.nbytes


def _kernel_of(
    heap: Heap, call: GroupCall, x: Tensor, out: Tensor, group: ProcessGroup
) -> PreparedKernel | str:
    """The kernel of such calls, made by all ranks together; or why there is none."""
    if call.name == ALL_REDUCE:
        choice = choose_sum_on_cuda(x, call.reduce_op, group, kind=GROUP)
        return prepare_all_reduce(choice, heap, x, call.reduce_op, ALL_REDUCE)
    shape = list(out.shape)
    part, dims = {
        ALL_GATHER: (x.shape, (None, 0)),
        ALL_TO_ALL: ([x.numel() // group.size()], (0, 0)),
        REDUCE_SCATTER: (shape, (0, None)),
    }[call.name]
    alone = StandAlone(call.name, call.name, [out, x], shape, part, *dims, call.reduce_op)
    choice = choose_alone(alone, group, GROUP)
    return choice.reason if choice.is_unfused else prepare_alone(choice, heap, alone)
