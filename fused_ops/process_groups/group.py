"""The process group ``"weft"``, as torch calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _allow_inflight_collective_as_graph_input
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ...symm_mem import CallAbandoned, flight_recorder
from ...symm_mem.call_cache import invalidate_calls
from ...symm_mem.heap.registry import has_name, heaps_of
from ...symm_mem.timeouts import call_timeout
from .. import validation
from . import options
from .batches import operations_of_batch, send_as_one
from .calls import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    MOST_BYTES,
    REDUCE_SCATTER,
    GroupCall,
    index_of,
    reduction_of,
    why_left,
)
from .cuda_calls import DeviceLines
from .host_calls import HostLine, prepare_on_host
from .taken import GroupCalls
from .work import DoneWork

_SUM: Any = dist.ReduceOp.SUM
BACKEND_TYPES = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}
#: Collectives from tensors to others, what torch calls these, of one pair or of several, and their methods. From 2.13
#: on torch has other names for the methods, too, and only then has the class below methods of these names.
_PAIRED = (
    (ALL_GATHER, ("output", "input"), "_allgather_base", "all_gather_single"),
    (
        *(ALL_GATHER, ("output_lists", "input_list")),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    (REDUCE_SCATTER, ("outputTensor", "inputTensor"), "_reduce_scatter_base", "reduce_scatter_single"),
    (
        *(REDUCE_SCATTER, ("outputTensors", "inputTensors")),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
)
_EXCHANGE = "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"
#: Methods of torch's process groups that weft never takes, and the public functions that call them.
_OTHERS = {
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "reduce_scatter")},
    **{name: name for name in ("barrier", "monitored_barrier")},
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
}


class WeftProcessGroup(ProcessGroup):
    """A process group whose calls weft takes where it is faster; gloo and NCCL take all others.

    >>> import torch, torch.distributed as dist
    >>> group = dist.new_group(backend="weft")  # or init_process_group("weft")
    >>> x = torch.ones(3)
    >>> dist.all_reduce(x, group=group)
    >>> bool((x == dist.get_world_size()).all())
    True

    Attributes:
        inner: the group of the same ranks without weft, which takes all other calls. Its backends are this group's,
            too, where torch's own code finds them.
        record: who took its calls; ``weft.process_group`` returns it.
    """

    def __init__(self, inner: ProcessGroup, taken_on: tuple[str, ...]) -> None:
        # The one constructor of torch's that leaves room for overrides. It knows of no store.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg, arg-type]
        self.inner = inner
        self._size = inner.size()
        # They are kept: torch would make other objects of them, without what they tell weft of timeouts.
        self._backends = {kind.type: inner._get_backend(kind) for kind in inner._device_types}
        names = {kind: backend.name() for kind, backend in self._backends.items()}
        self.record = GroupCalls(inner.group_name, taken_on, names)
        self._coalescing = False
        self._host = HostLine(inner.group_name)
        self._device = DeviceLines(self, inner.group_name)
        # The last batch of sends and receives, and the work of each that the group is yet to be asked for.
        self._batch: tuple[Any, list[Work]] = None, []
        if inner.bound_device_id is not None:
            self.bound_device_id = inner.bound_device_id
        for name, backend in self._backends.items():
            self._register_backend(torch.device(name), BACKEND_TYPES[backend.name()], backend)
        self._set_default_backend(BACKEND_TYPES[inner.name()])
        super()._set_group_name(inner.group_name)
        super()._set_group_desc(inner.group_desc)

    # What weft may take. torch's C++ code (functional collectives) calls these by name, too.

    def allreduce(self, tensors: Any, *args: Any, **named: Any) -> Work | None:  # type: ignore[override]
        if len(args) == 1 and type(args[0]) is dist.AllreduceOptions and len(tensors) == 1:
            x = tensors[0]
            if (cached := self._launch_cached(ALL_REDUCE, x, x, args[0])) is not False:
                return cached
        opts = options.all_reduce_options(args, named)
        given = tensors, *args
        return self._take(ALL_REDUCE, options.all_reduces(tensors, opts), opts, "allreduce", given, named)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        calls = options.all_reduces(tensors, opts)
        return self._take(ALL_REDUCE, calls, opts, "allreduce_coalesced", (tensors, opts))

    def alltoall_base(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **named: Any,
    ) -> Work | None:
        opts = options.all_to_all_options(args, named)
        splits = [*output_split_sizes, *input_split_sizes]
        # What is cached is known by its number of elements alone.
        evenly = all(t.dim() and t.shape[0] % self._size == 0 for t in (input, output))
        known = evenly and not splits and output is not input
        if known and (cached := self._launch_cached(ALL_TO_ALL, input, output, opts)) is not False:
            return cached
        given = output, input, output_split_sizes, input_split_sizes, *args
        # With splits of one rank that are even those of others need not be.
        calls: Any = "split sizes are given"
        if not splits:
            x = input.clone() if input is output else input
            calls = options.paired_calls(ALL_TO_ALL, [output], [x])
        return self._take(ALL_TO_ALL, calls, opts, _EXCHANGE, given, named)

    if _EXCHANGE == "all_to_all_single":
        all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _launch_cached(self, name: str, x: Any, out: Any, opts: Any) -> Work | Literal[False] | None:
        """Launches a call on CUDA that is in the cache, with minimal overhead.

        Returns:
            its work if it is asynchronous, else None, as NCCL; False if it is not in the cache.
        """
        if type(x) is not Tensor or type(out) is not Tensor or index_of(x) < 0:
            return False
        if self._coalescing or x.layout is not torch.strided or out.layout is not torch.strided:
            return False
        if x.nbytes > MOST_BYTES or out.nbytes > MOST_BYTES:
            return False
        if profiler._is_profiler_enabled or opts.timeout != options.UNSET:
            return False
        op: str | None = ""
        if name in (ALL_REDUCE, REDUCE_SCATTER):
            op = "sum" if opts.reduceOp == _SUM else reduction_of(opts.reduceOp)
        if op is None:
            return False
        # All functional collectives are asynchronous.
        done = self._device.launch_again(name, x, out, op, opts.asyncOp)
        if done is False:
            return False
        self.record.taken[name] += 1
        if done is True:
            return None
        if _allow_inflight_collective_as_graph_input():
            done.wait()
        return done

    def _take(
        self,
        name: str,
        calls: list[GroupCall] | str,
        opts: Any,
        method: str,
        given: tuple[Any, ...],
        named: dict[str, Any] | None = None,
    ) -> Work:
        """The call's work, by weft if it takes it, else by this method of the group inside."""
        named = named or {}
        if self._coalescing:
            return getattr(self.inner, method)(*given, **named)  # type: ignore[no-any-return]
        why: str | None
        if isinstance(calls, str):
            why, kind = calls, ""
        elif not calls or (kind := calls[0].x.device.type) not in self.record.taken_on:
            why, kind = "", ""
        else:
            why = next((why for call in calls if (why := why_left(self._size, call)) is not None), None)
        if why is None:
            assert isinstance(calls, list)
            seconds = options.seconds_of(opts.timeout)
            with (
                record_function(f"weft:{name}") if profiler._is_profiler_enabled else nullcontext(),
                nullcontext() if seconds is None else call_timeout(seconds),
            ):
                done = self._run(calls, opts.asyncOp, seconds)
            if not isinstance(done, str):
                self.record.taken[name] += 1
                return done
            why = done
            flight_recorder.runs_unfused()
        self.record.count_left(name, why, kind)
        return self._delegate(method, *given, **named)

    def _run(self, calls: list[GroupCall], asynchronous: bool, seconds: float | None) -> DoneWork | str:
        if not has_name(self, self.group_name):
            return "torch does not know the group by its name"  # destroyed, or never registered
        if calls[0].x.is_cuda:
            done = self._device.run(calls, asynchronous=asynchronous, seconds=seconds)
        else:
            for call in calls:  # before anything is sent; on CUDA NCCL refuses it
                validation.not_expanded("tensor" if call.x is call.out else "output", call.out)
            exchanges = []
            for call in calls:
                exchange = prepare_on_host(self, call, seconds)
                if isinstance(exchange, str):
                    return exchange
                exchanges.append(exchange)
            done = self._host.run(exchanges, asynchronous=asynchronous)
        if asynchronous and _allow_inflight_collective_as_graph_input() and not isinstance(done, str):
            done.wait()  # a compiled graph would look for torch's own work
        return done

    def _delegate(self, method: str, *args: Any, **named: Any) -> Work:
        device = _device_of(args)
        if device is None or device.type != "cuda" or self._coalescing:
            return getattr(self.inner, method)(*args, **named)  # type: ignore[no-any-return]
        self._device.order_after(device)
        work: Work = getattr(self.inner, method)(*args, **named)
        self._device.order_before(work)
        return work

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        return self._point_to_point("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        return self._point_to_point("recv", tensors, src, tag)

    def _point_to_point(self, method: str, tensors: list[Tensor], peer: int, tag: int) -> Work:
        device = tensors[0].device
        self.record.count_left(method, "", device.type)
        operations = None if device.type == "cpu" else operations_of_batch(sys._getframe(2))
        if operations is None or not self.inner._get_backend(device).supports_coalescing:
            return self._delegate(method, tensors, peer, tag)
        batch, works = self._batch
        if batch is not operations or not works:
            self._device.order_after(device)
            works = send_as_one(self.inner, operations, device)
            self._batch = operations, works
        return works.pop()

    # Delegated to the inner group.

    def get_group_store(self) -> Any:
        return self.inner.get_group_store()

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self.inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self.inner._set_group_desc(desc)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)
        self._coalescing = True

    def _end_coalescing(self, device: torch.device) -> Work:
        self._coalescing = False
        return self.inner._end_coalescing(device)

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that the group has begun, weft's and the others'."""
        inside = int(self.inner._get_sequence_number_for_group())  # type: ignore[attr-defined]
        return inside + sum(self.record.taken.values())

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)
        options.set_group_timeout(timeout, self.group_name)

    def shutdown(self) -> None:
        invalidate_calls()
        self._host.end()
        self.inner.shutdown()

    def abort(self) -> None:
        # No call follows on this rank. CPU ranks that wait for it in weft are told.
        why = CallAbandoned("abort", self.group_name, self.rank(), "the process group was aborted", None)
        for heap in heaps_of(self):
            if heap.fault is not None:
                heap.fault.breaks(why)
        self._host.end()
        self.inner.abort()

    def split_group(self, new_ranks: list[int], *args: Any, **named: Any) -> WeftProcessGroup | None:
        made = self.inner.split_group(new_ranks, *args, **named)
        if made is None:
            return None
        for kind in self.record.taken_on:
            options.set_group_timeout(made._get_backend(torch.device(kind)).options._timeout, made.group_name)
        return WeftProcessGroup(made, self.record.taken_on)

    def merge_remote_group(self, *args: Any, **named: Any) -> WeftProcessGroup:
        return WeftProcessGroup(self.inner.merge_remote_group(*args, **named), self.record.taken_on)


def _paired(name: str, tensors: tuple[str, str], method: str) -> Callable[..., Any]:
    of_call = AllgatherOptions if name == ALL_GATHER else ReduceScatterOptions
    several = method.endswith("coalesced")

    def call(
        self: WeftProcessGroup, out: Any = None, x: Any = None, opts: Any = None, **named: Any
    ) -> Work | None:
        if named:
            given = {**dict(zip(tensors, (out, x), strict=True)), **named}
            if len(given) > len(tensors):
                raise TypeError(f"{method}: takes {', '.join(tensors)} and opts, not {', '.join(named)}")
            out, x = given.values()
        opts = of_call() if opts is None else opts
        if not several and (cached := self._launch_cached(name, x, out, opts)) is not False:
            return cached
        outs, xs = (out, x) if several else ([out], [x])
        calls = options.paired_calls(name, outs, xs, getattr(opts, "reduceOp", None))
        return self._take(name, calls, opts, method, (out, x, opts))

    call.__name__ = method
    return call


def _left_alone(method: str, collective: str) -> Callable[..., Any]:
    def call(self: WeftProcessGroup, *args: Any, **named: Any) -> Any:
        device = _device_of(args)
        self.record.count_left(collective, "", device.type if device is not None else "")
        return self._delegate(method, *args, **named)

    call.__name__ = method
    return call


def _device_of(args: Any) -> torch.device | None:
    """Of the first tensor."""
    for given in args:
        if isinstance(given, Tensor):
            return given.device
        if isinstance(given, (list, tuple)) and (found := _device_of(given)) is not None:
            return found
    return None


for _collective, _tensors, _old, _new in _PAIRED:
    _there = [each for each in (_old, _new) if hasattr(ProcessGroup, each)]
    for _method in _there:
        setattr(WeftProcessGroup, _method, _paired(_collective, _tensors, _there[-1]))
for _method, _collective in _OTHERS.items():
    if hasattr(ProcessGroup, _method):
        setattr(WeftProcessGroup, _method, _left_alone(_method, _collective))
