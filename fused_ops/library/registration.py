"""What torch.library is told of each op of ``ops/``: all of it follows from the ``Op``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

from ..dispatch.choice import CHOOSERS
from ..dispatch.tensor_guards import has_tangents
from ..ops import OPS, Op
from ..ops.gradients import AUTOCAST, refuse_gradient
from ..ops.op import LOCAL_OPS, tensors_given
from . import group_checks, schema
from .implement import implement, refuse_derivative_in_transform, refuse_unsupported

_log = logging.getLogger("weft.ops")
_said: set[str] = set()  # ops that have met autocast with what it would cast


def _on_records(
    op: Op, run: Callable[[Any], Any], fast: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """``run`` as torch calls it. With ``fast``: of a call that took no fast path."""
    record, group_size, returns_nothing = op.record, group_checks.group_size, op.functional is not None

    def of_torch(*args: Any, **named: Any) -> Any:
        call = record(*args, **named)
        if call.group_size is not None:
            group_size(call.group_size, call.group_name)
        done = None if fast is None else fast(call)
        if done is None:
            return run(call)
        return None if returns_nothing else done

    return of_torch


def _fake(op: Op) -> Callable[[Any], Any]:
    return lambda call: op.fake(*op.validate(call))


def _say_what_is_not_cast(op: OpOverload, args: Sequence[Any]) -> None:
    """Once for an op: that autocast would cast what it multiplies or reduces, if it were torch's."""
    name = op._schema.name
    operands = tree_leaves(args[: 2 if "matmul" in name else 1])
    if name not in _said and any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in operands):
        _said.add(name)
        _log.warning(
            "%s: autocast casts nothing for weft's ops: cast operands of float32, or use the layers, which cast as "
            "nn.Linear does",
            name,
        )


def _below_autocast(op: OpOverload) -> Callable[..., Any]:
    """The op without autocast: it would cast the products of what runs unfused or between CPU ranks, and no others."""

    def call(*args: Any, **named: Any) -> Any:
        _say_what_is_not_cast(op, args)
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return op(*args, **named)

    return call


def _wants_grad(op: str, tensors: Sequence[Tensor]) -> bool:
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        wants = True  # there is no forward mode: torch refuses it for an autograd.Function that has none
    if wants:
        refuse_derivative_in_transform(op)
    return wants


def _autograd(op: Op) -> Callable[[Any], Any]:
    """What the Autograd key does with a call that took no fast path. The graph pass inserts the ops below it."""

    def call_with_autograd(call: Any) -> Any:
        if _wants_grad(op.name, tensors_given(call)):
            if isinstance(op.with_gradient, str):
                refuse_gradient(op.validate, call, op.with_gradient)
            return op.with_gradient(call)
        if op.functional is not None and any(t.is_neg() for t in tensors_given(call)):
            # What resolves that below has no way with ops that return nothing.
            functional, as_functional = op.functional
            call[0].copy_(functional.dispatch(as_functional(call)))
            return None
        return op.run_slow(call)

    return call_with_autograd


def _local_autograd(name: str, with_gradient: Callable[..., Any]) -> Callable[..., Any]:
    op = getattr(torch.ops.weft, name).default

    def call(*args: Any) -> Any:
        if _wants_grad(name, [x for x in args if isinstance(x, Tensor)]):
            return with_gradient(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


for _op in OPS:
    implement(_op.overload, _on_records(_op, _op.slow, _op.fast), _on_records(_op, _fake(_op)))
    CHOOSERS[_op.overload] = _on_records(_op, _op.choice_of)
    schema.lib.impl(_op.name, _on_records(_op, _autograd(_op), _op.fast), "Autograd")
    for _key in ("AutocastCPU", "AutocastCUDA"):
        schema.lib.impl(_op.name, _below_autocast(_op.overload), _key)
    if _op.flops is not None:
        register_flop_formula(_op.overload.overloadpacket)(_op.flops)
# Which send nothing.
for _name, _gradient in LOCAL_OPS.items():
    refuse_unsupported(_name)
    if _gradient is not None:
        schema.lib.impl(_name, _local_autograd(_name, _gradient), "Autograd")
