"""What Python code calls of a process group: methods of torch's class, which here ask weft first.

A call on CUDA like one before is launched from here, before torch makes a call of the dispatcher of it, which costs the
host three times as much. All other calls go on there (torch_ops.py). Groups of other backends are only looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from .calls import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, reduction_of_code
from .group import WeftProcessGroup, known_group
from .options import set_group_timeout
from .work import DoneWork

_UNSET = AllgatherOptions().timeout
_METHODS: dict[str, tuple[str, ...]] = {
    ALL_GATHER: ("_allgather_base", "all_gather_single"),
    REDUCE_SCATTER: ("_reduce_scatter_base", "reduce_scatter_single"),
}


def take_methods() -> None:
    """From now on."""
    _change("allreduce", _all_reduce)
    for name in _METHODS[ALL_GATHER]:
        _change(name, _all_gather)
    for name in _METHODS[REDUCE_SCATTER]:
        _change(name, _reduce_scatter)
    _tell("abort", lambda known, *_: known.aborts(), before=True)
    _tell("shutdown", lambda known, *_: known.ends(), before=True)
    _tell("set_timeout", lambda known, timeout: set_group_timeout(timeout, known.group_name), before=False)
    _tell("_start_coalescing", lambda known, *_: setattr(known, "coalesces", True), before=False)
    _tell("_end_coalescing", lambda known, *_: setattr(known, "coalesces", False), before=True)


def _change(name: str, make: Callable[[Any], Any]) -> None:
    method = getattr(ProcessGroup, name, None)
    if method is not None:
        setattr(ProcessGroup, name, wraps(method)(make(method)))


def _all_reduce(method: Any) -> Any:
    def call(self: ProcessGroup, *args: Any, **named: Any) -> Work:
        known = known_group(self)
        if known is not None and not named and len(args) == 2:
            tensors, opts = args
            if type(opts) is AllreduceOptions and type(tensors) is list and len(tensors) == 1:
                x = tensors[0]
                if _launched(known, ALL_REDUCE, x, x, opts, opts.reduceOp):
                    return DoneWork(tensors)
        result: Work = method(self, *args, **named)
        return result

    return call


def _all_gather(method: Any) -> Any:
    def call(self: ProcessGroup, *args: Any, **named: Any) -> Work:
        known = known_group(self)
        if known is not None and not named and len(args) == 3:
            out, x, opts = args
            if type(opts) is AllgatherOptions and _launched(known, ALL_GATHER, x, out, opts):
                return DoneWork([out])
        result: Work = method(self, *args, **named)
        return result

    return call


def _reduce_scatter(method: Any) -> Any:
    def call(self: ProcessGroup, *args: Any, **named: Any) -> Work:
        known = known_group(self)
        if known is not None and not named and len(args) == 3:
            out, x, opts = args
            if type(opts) is ReduceScatterOptions and _launched(
                known, REDUCE_SCATTER, x, out, opts, opts.reduceOp
            ):
                return DoneWork([out])
        result: Work = method(self, *args, **named)
        return result

    return call


def _launched(
    known: WeftProcessGroup, name: str, x: Tensor, out: Tensor, opts: Any, reduce_op: Any = None
) -> bool:
    """Whether the call waits, has the group's deadline, and was like one before."""
    if opts.asyncOp or opts.timeout != _UNSET:
        return False
    return known.again(name, x, out, "" if reduce_op is None else reduction_of_code(reduce_op.op))


def _tell(name: str, tell: Any, *, before: bool) -> None:
    """The method tells weft, if the group has it."""

    def make(method: Any) -> Any:
        def call(self: ProcessGroup, *args: Any, **named: Any) -> Any:
            known = known_group(self)
            if known is not None and before:
                tell(known, *args, *named.values())
            result = method(self, *args, **named)
            if known is not None and not before:
                tell(known, *args, *named.values())
            return result

        return call

    _change(name, make)
