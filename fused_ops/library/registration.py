"""What torch.library is told of the ops, besides their schemas: implementations of their calls as records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..dispatch.planning import is_planning
from . import autograd_calls, compiled, fakes, group_checks, implementations, schema
from .autograd import AUTOCAST
from .implementations import Implementation
from .unsupported import refuse_unsupported

_log = logging.getLogger("weft.ops")
_said: set[str] = set()  # ops that have met autocast with what it would cast


def _on_records(
    op: Implementation, run: Callable[[Any], Any], fast: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """``run`` as torch calls it. With ``fast``: of a call that took no fast path."""
    record, group_size = op.record, group_checks.group_size
    returns_nothing = not op.op._schema.returns

    @wraps(run)
    def implement(*args: Any, **named: Any) -> Any:
        call = record(*args, **named)
        if call.group_size is not None:
            group_size(call.group_size, call.group_name)
        done = None if fast is None else fast(call)
        if done is None:
            return run(call)
        return None if returns_nothing else done

    return implement


def _or_plan(op: Implementation, fake: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``fake``, or where the call is planned what is done with a real one, up to its plan."""

    @wraps(fake)
    def run(call: Any) -> Any:
        return op.slow(call) if is_planning() else fake(call)

    return run


def _say_what_is_not_cast(op: OpOverload, args: Sequence[Any]) -> None:
    """Once for an op: that autocast would cast what it multiplies or reduces, if it were torch's."""
    name = op._schema.name
    operands = tree_leaves(args[: 2 if "matmul" in name else 1])
    if name not in _said and any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in operands):
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


for _op, _fake, _autograd in (
    (
        implementations.ALL_GATHER_MATMUL,
        fakes.fake_all_gather_matmul,
        autograd_calls.differentiable_all_gather_matmul,
    ),
    (
        implementations.MATMUL_REDUCE_SCATTER,
        fakes.fake_matmul_reduce_scatter,
        autograd_calls.differentiable_matmul_reduce_scatter,
    ),
    (
        implementations.ALL_GATHER_SCALED_MATMUL,
        fakes.fake_all_gather_scaled_matmul,
        autograd_calls.refuse_gradient_or_all_gather_scaled_matmul,
    ),
    (
        implementations.SCALED_MATMUL_REDUCE_SCATTER,
        fakes.fake_scaled_matmul_reduce_scatter,
        autograd_calls.refuse_gradient_or_scaled_matmul_reduce_scatter,
    ),
    (
        implementations.ALL_REDUCE,
        fakes.fake_all_reduce,
        autograd_calls.differentiable_all_reduce,
    ),
    (
        implementations.ALL_GATHER,
        fakes.fake_all_gather,
        autograd_calls.differentiable_all_gather,
    ),
    (
        implementations.ALL_GATHER_OUT,
        fakes.fake_all_gather_out,
        autograd_calls.refuse_gradient_or_all_gather_out,
    ),
    (
        implementations.REDUCE_SCATTER,
        fakes.fake_reduce_scatter,
        autograd_calls.differentiable_reduce_scatter,
    ),
    (
        implementations.REDUCE_SCATTER_OUT,
        fakes.fake_reduce_scatter_out,
        autograd_calls.refuse_gradient_or_reduce_scatter_out,
    ),
    (
        implementations.ALL_REDUCE_RMS_NORM,
        fakes.fake_all_reduce_norm,
        autograd_calls.differentiable_all_reduce_rms_norm,
    ),
    (
        implementations.ALL_REDUCE_RMS_NORM_QUANT,
        fakes.fake_all_reduce_rms_norm_quant,
        autograd_calls.refuse_gradient_or_all_reduce_rms_norm_quant,
    ),
    (
        implementations.ALL_REDUCE_LAYER_NORM,
        fakes.fake_all_reduce_norm,
        autograd_calls.differentiable_all_reduce_layer_norm,
    ),
    (
        implementations.MATMUL_ALL_REDUCE,
        fakes.fake_matmul_all_reduce,
        autograd_calls.differentiable_matmul_all_reduce,
    ),
    (
        implementations.ALL_REDUCE_IN_PLACE,
        fakes.fake_all_reduce_in_place,
        autograd_calls.refuse_gradient_or_all_reduce_in_place,
    ),
):
    _overload = _op.op
    _name = str(_overload._schema.name).removeprefix("weft::")
    _known_fake = compiled.known_to_inductor(_on_records(_op, _or_plan(_op, _fake)))
    torch.library.register_fake(f"weft::{_name}", _known_fake, lib=schema.lib)
    compiled.declare_communicating(_overload)
    for _key in ("CPU", "CUDA"):
        schema.lib.impl(_name, _on_records(_op, _op.slow, _op.fast_on_device or _op.fast), _key)
    schema.lib.impl(_name, _on_records(_op, _autograd, _op.fast), "Autograd")
    refuse_unsupported(schema.lib, _name)
    for _key in ("AutocastCPU", "AutocastCUDA"):
        schema.lib.impl(_name, _below_autocast(_overload), _key)
