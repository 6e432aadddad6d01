"""The overloads of a process group's methods, as one form each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from ...symm_mem.timeouts import LONGEST, set_timeout
from .calls import ALL_REDUCE, GroupCall, reduction_of, waited_for

UNSET = AllgatherOptions().timeout  #: of options that have none: the group's counts


def seconds_of(timeout: timedelta | None) -> float | None:
    """A deadline that a call or a wait was given; None if it was given none, as torch says that: unset, or 0."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return min(timeout.total_seconds(), LONGEST)


def set_group_timeout(timeout: timedelta, group_name: str) -> None:
    """What a group's waits have as their deadline from now on."""
    if (seconds := seconds_of(timeout)) is not None:
        set_timeout(seconds, group_name)


def all_reduce_options(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Of ``allreduce(tensors, opts)`` or ``allreduce(tensors, op, timeout)``; None of what torch refuses."""
    opts = given[0] if given else named.get("opts")
    if isinstance(opts, dist.AllreduceOptions):
        return opts if len(given) + len(named) == 1 else None
    try:
        return _options_of_sum(*given, **named)
    except TypeError:
        return None


def _options_of_sum(op: Any = ReduceOp.SUM, timeout: timedelta | None = None) -> dist.AllreduceOptions:
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    if timeout is not None:
        opts.timeout = timeout
    return opts


def all_reduces(tensors: Any, opts: Any) -> list[GroupCall] | str:
    """A call for each tensor, or why weft has none for them."""
    op = None if opts is None else reduction_of(opts.reduceOp)
    if op is None or getattr(opts, "sparseIndices", None) is not None:
        return "a reduction that weft does not have"
    found = [waited_for(x) for x in (tensors if isinstance(tensors, (list, tuple)) else [tensors])]
    return [GroupCall(ALL_REDUCE, x, x, op) for x in found]


def paired_calls(name: str, outputs: Any, inputs: Any, op: Any = None) -> list[GroupCall] | str:
    """The same of other collectives; ``op``: of those that reduce."""
    if (reduce_op := "" if op is None else reduction_of(op)) is None:
        return "a reduction that weft does not have"
    if len(outputs) != len(inputs) or not all(isinstance(t, Tensor) for t in (*outputs, *inputs)):
        return "arguments that do not fit each other"
    return [GroupCall(name, out, waited_for(x), reduce_op) for out, x in zip(outputs, inputs, strict=True)]


def all_to_all_options(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Of the two signatures that torch has: with options, or with a timeout."""
    opts = next((each for each in (*given, *named.values()) if isinstance(each, AllToAllOptions)), None)
    if opts is None:
        opts = AllToAllOptions()
        timeout = next((each for each in (*given, *named.values()) if isinstance(each, timedelta)), None)
        if timeout is not None:
            opts.timeout = timeout
    return opts


def functional_reduction(reduce_op: str) -> Any:
    """The ReduceOp that functional collectives call by this name."""
    op = ReduceOp.RedOpType.__members__.get(reduce_op.upper())
    if op is None:
        raise ValueError(f"reduce_op: is {reduce_op!r}, must be the name of a ReduceOp")
    return op
