"""The collectives of process groups in torch's dispatcher: calls of groups with weft go to weft, others go on.

Whoever calls a group, ``torch.distributed`` (but for what methods.py takes), a compiled graph, DDP's C++ code, comes
by the ops ``c10d::allreduce_`` and its like. Their kernels here have the key BackendSelect, which every call passes
before that of its device: so torch's own kernels stay where they are, and a call that weft leaves goes on to them with
all that it was given. Calls of other groups go on likewise: in a process that has a group with weft, each costs the
host some 20 us more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed import ProcessGroup, Work

from .calls import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, GroupCall, reduction_of
from .group import ENDED, WeftProcessGroup, known_group
from .options import seconds_of_milliseconds

#: torch's ops of which weft takes nothing, and what a program calls for them.
_OTHERS = {
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
}
_UNFIT = "arguments that do not fit each other"
_UNKNOWN = "a reduction that weft does not have"
_library = torch.library.Library("c10d", "IMPL")
_unbox = ProcessGroup.unbox


@cache
def take_calls() -> None:
    """From now on."""
    taking: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "allreduce_": _all_reduce,
        "allreduce_coalesced_": _all_reduce_coalesced,
        "_allgather_base_": _all_gather,
        "allgather_into_tensor_coalesced_": _all_gather_coalesced,
        "_reduce_scatter_base_": _reduce_scatter,
        "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    }
    for name, make in taking.items():
        _library.impl(name, make(getattr(torch.ops.c10d, name).default), "BackendSelect")
    for name, collective in _OTHERS.items():
        op = getattr(torch.ops.c10d, name, None)
        if op is not None:
            _library.impl(name, _left_alone(op.default, collective), "BackendSelect")


_KEYS = {kind.lower(): DispatchKeySet(getattr(DispatchKey, kind)) for kind in ("CPU", "CUDA", "Meta")}
_SPARSE = {"cpu": DispatchKeySet(DispatchKey.SparseCPU), "cuda": DispatchKeySet(DispatchKey.SparseCUDA)}


def _go_on(op: Any, args: Sequence[Any]) -> Any:
    """torch's own kernel of the call. It runs without the GIL."""
    x = _first_tensor(args)
    if x is None:  # torch says what is wrong with it
        return op.redispatch(_KEYS["cpu"], *args)
    kind = x.device.type
    keys = (_SPARSE if x.is_sparse else _KEYS).get(kind)
    if keys is None:
        keys = torch._C._dispatch_keys(x).remove(DispatchKey.BackendSelect)
    return op.redispatch(keys, *args)


def _first_tensor(args: Any) -> Tensor | None:
    for given in args:
        if isinstance(given, Tensor):
            return given
        if isinstance(given, (list, tuple)) and (found := _first_tensor(given)) is not None:
            return found
    return None


def _leave(op: Any, group: WeftProcessGroup, args: Sequence[Any]) -> Any:
    """A call of a group with weft that is its own backend's."""
    x = _first_tensor(args)
    if x is None or not x.is_cuda or group.coalesces:
        return _go_on(op, args)
    group.before_others(x.device)
    result = _go_on(op, args)
    work = result[-1] if isinstance(result, (tuple, list)) else result
    if isinstance(work, torch.ScriptObject):
        group.after_others(Work.unbox(work))
    return result


def _left_alone(op: Any, collective: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        group = known_group(_unbox(next(a for a in args if isinstance(a, torch.ScriptObject))))
        if group is None:
            return _go_on(op, args)
        x = _first_tensor(args)
        group.note(collective, "", "" if x is None else x.device.type)
        return _leave(op, group, args)

    return kernel


def _all_reduce(op: Any) -> Callable[..., Any]:
    def kernel(
        tensors: list[Tensor],
        box: Any,
        reduce_op: Any,
        sparse_indices: Tensor | None = None,
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        args = tensors, box, reduce_op, sparse_indices, async_op, timeout
        group = known_group(_unbox(box))
        if group is None:
            return _go_on(op, args)
        reduction = reduction_of(reduce_op)
        alone = len(tensors) == 1 and not async_op and timeout <= 0
        if alone and group.again(ALL_REDUCE, tensors[0], tensors[0], reduction):
            return tensors, ENDED
        found = _UNKNOWN if reduction is None or sparse_indices is not None else _of_each(tensors, reduction)
        work = group.take(ALL_REDUCE, found, async_op, seconds_of_milliseconds(timeout))
        return _leave(op, group, args) if work is None else (tensors, work)

    return kernel


def _of_each(tensors: list[Tensor], reduction: str) -> list[GroupCall]:
    return [GroupCall(ALL_REDUCE, x, x, reduction) for x in tensors]


def _all_reduce_coalesced(op: Any) -> Callable[..., Any]:
    def kernel(
        tensors: list[Tensor], box: Any, reduce_op: Any, async_op: bool = True, timeout: int = -1
    ) -> Any:
        args = tensors, box, reduce_op, async_op, timeout
        group = known_group(_unbox(box))
        if group is None:
            return _go_on(op, args)
        reduction = reduction_of(reduce_op)
        found = _UNKNOWN if reduction is None else _of_each(tensors, reduction)
        work = group.take(ALL_REDUCE, found, async_op, seconds_of_milliseconds(timeout))
        return _leave(op, group, args) if work is None else work

    return kernel


def _all_gather(op: Any) -> Callable[..., Any]:
    def kernel(out: Tensor, x: Tensor, box: Any, async_op: bool = True, timeout: int = -1) -> Any:
        args = out, x, box, async_op, timeout
        group = known_group(_unbox(box))
        if group is None:
            return _go_on(op, args)
        if not async_op and timeout <= 0 and group.again(ALL_GATHER, x, out, ""):
            return out, ENDED
        work = group.take(
            ALL_GATHER, [GroupCall(ALL_GATHER, out, x)], async_op, seconds_of_milliseconds(timeout)
        )
        return _leave(op, group, args) if work is None else (out, work)

    return kernel


def _all_gather_coalesced(op: Any) -> Callable[..., Any]:
    # Before torch 2.15 the op has no deadline; the options of one are the group's then.
    def kernel(outs: list[Tensor], xs: list[Tensor], box: Any, async_op: bool = True, *timeout: int) -> Any:
        args = outs, xs, box, async_op, *timeout
        group = known_group(_unbox(box))
        if group is None:
            return _go_on(op, args)
        found = _pairs(ALL_GATHER, outs, xs, "")
        work = group.take(ALL_GATHER, found, async_op, seconds_of_milliseconds(*timeout or (-1,)))
        return _leave(op, group, args) if work is None else work

    return kernel


def _reduce_scatter(op: Any) -> Callable[..., Any]:
    def kernel(
        out: Tensor, x: Tensor, box: Any, reduce_op: Any, async_op: bool = True, timeout: int = -1
    ) -> Any:
        args = out, x, box, reduce_op, async_op, timeout
        group = known_group(_unbox(box))
        if group is None:
            return _go_on(op, args)
        reduction = reduction_of(reduce_op)
        if not async_op and timeout <= 0 and group.again(REDUCE_SCATTER, x, out, reduction):
            return out, ENDED
        found = _UNKNOWN if reduction is None else [GroupCall(REDUCE_SCATTER, out, x, reduction)]
        work = group.take(REDUCE_SCATTER, found, async_op, seconds_of_milliseconds(timeout))
        return _leave(op, group, args) if work is None else (out, work)

    return kernel


def _reduce_scatter_coalesced(op: Any) -> Callable[..., Any]:
    def kernel(
        outs: list[Tensor],
        xs: list[Tensor],
        box: Any,
        reduce_op: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        args = outs, xs, box, reduce_op, async_op, timeout
        group = known_group(_unbox(box))
        if group is None:
            return _go_on(op, args)
        reduction = reduction_of(reduce_op)
        found = _UNKNOWN if reduction is None else _pairs(REDUCE_SCATTER, outs, xs, reduction)
        work = group.take(REDUCE_SCATTER, found, async_op, seconds_of_milliseconds(timeout))
        return _leave(op, group, args) if work is None else work

    return kernel


def _pairs(name: str, outs: list[Tensor], xs: list[Tensor], reduction: str) -> list[GroupCall] | str:
    if len(outs) != len(xs):
        return _UNFIT
    return [GroupCall(name, out, x, reduction) for out, x in zip(outs, xs, strict=True)]
