"""What torch.library is told of collectives that are waited for later. Graphs of the pass have them, users do not.

A wait takes x along with the token: until then x is read, so nothing may overwrite it or take its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed import ProcessGroup

from .. import validation
from ..dispatch.call_check import OpCall, begin_call
from ..dispatch.choice import CHOOSERS, Choice
from ..library import group_checks, schema
from ..library.implement import implement
from ..ops import ALL_GATHER, REDUCE_SCATTER
from ..ops.all_gather import AllGatherCall
from ..ops.op import with_poison
from ..ops.reduce_scatter import ReduceScatterCall
from .call import AsyncCall
from .run import choice_of_start, fast_start, run_release, run_start, run_wait

GATHER, SCATTER = "all_gather", "reduce_scatter"


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
    return choice_of_start(call, _checked(call))


def _start(call: AsyncCall) -> Tensor:
    if (token := fast_start(call)) is not None:
        return token
    return _slow_start(call)


@with_poison
def _slow_start(call: AsyncCall) -> Tensor:
    group = _checked(call)
    given: dict[str, object] = {"x": call.x} | (
        {"placed": call.placed} if call.gathers else {"reduce_op": call.reduce_op}
    )
    begin_call(OpCall(call.start, given, call.x.device.type), group, call.x.device)
    return run_start(call, group)


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
