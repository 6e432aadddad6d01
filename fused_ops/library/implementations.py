"""What the ops do on CPU and CUDA: the fast path, else all checks and a call on the slow path."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from ...kernels.all_reduce.host import IN_PLACE
from ...symm_mem import flight_recorder
from ...symm_mem.failure.call_log import poison_on_error
from ..dispatch.call_check import begin_call, take_begun
from ..dispatch.fast_path import needs_no_dispatch
from ..ops import all_gather as _gather
from ..ops import all_gather_matmul as _ag
from ..ops import all_gather_scaled_matmul as _ags
from ..ops import all_reduce as _ar
from ..ops import all_reduce_layer_norm as _aln
from ..ops import all_reduce_rms_norm as _arn
from ..ops import matmul_all_reduce as _mar
from ..ops import matmul_reduce_scatter as _rs
from ..ops import reduce_scatter as _scatter
from ..ops import scaled_matmul_reduce_scatter as _srs
from ..ops.calls import (
    AllGatherCall,
    AllGatherMatmulCall,
    AllGatherOutCall,
    AllReduceCall,
    AllReduceLayerNormCall,
    AllReduceRmsNormCall,
    AllReduceRmsNormQuantCall,
    MatmulAllReduceCall,
    MatmulReduceScatterCall,
    OpArguments,
    ReduceScatterCall,
    ReduceScatterOutCall,
)
from ..ops.scaled_calls import AllGatherScaledMatmulCall, ScaledMatmulReduceScatterCall
from . import scaled_validation, schema, validation

_VIEWS = DispatchKeySet(DispatchKey.ADInplaceOrView)


class Implementation(NamedTuple):
    """What an op does with a call, a ``record``.

    Attributes:
        fast: the results, if such a call was made before on CUDA; else None, and nothing happened. Its tensors may be
            anything.
        slow: checks the arguments and makes the call.
        fast_on_device: as ``fast``, where the dispatcher has seen to what else tensors may be, if that is less work.
    """

    op: OpOverload
    record: Callable[..., Any]
    fast: Callable[[Any], Any]
    slow: Callable[[Any], Any]
    fast_on_device: Callable[[Any], Any] | None = None

    def run_below_autograd(self, call: OpArguments) -> Any:
        done = self.fast(call)
        return self.run_slow(call) if done is None else done

    def run_slow(self, call: OpArguments) -> Any:
        """By way of the dispatcher where something else must see the call."""
        if needs_no_dispatch(*call.tensors):
            return self.slow(call)
        with torch._C._AutoDispatchBelowAutograd():
            return self.dispatch(call)

    def dispatch(self, call: OpArguments) -> Any:
        arguments = {name: getattr(call, name) for name in call._fields}
        given = [arguments.pop(a.name) for a in self.op._schema.arguments if not a.kwarg_only]
        return self.op(*given, **arguments)


def _fresh(run: Callable[..., Any]) -> Callable[..., Any]:
    """Its results are new tensors, like those of torch's own ops. They are views of what kernels write, and as such
    autograd would let nobody change them in place."""

    @wraps(run)
    def call(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
            return run(*args)

    return call


def begins_call(run: Callable[..., Any]) -> Callable[..., Any]:
    """If an exception ends it in the midst of what peers wait for, the group is broken. What it has begun goes with
    it: the thread's next call may come late, and operands are large."""
    guarded = poison_on_error(run)

    @wraps(run)
    def call(*args: Any) -> Any:
        try:
            done = guarded(*args)
        except BaseException:
            take_begun()
            raise
        flight_recorder.end(flight_recorder.take_recorded())
        return done

    return call


def _begin(op: str, call: OpArguments, group: ProcessGroup) -> None:
    arguments = {
        name: getattr(call, name) for name in call._fields if name not in ("group_name", "group_size")
    }
    begin_call(op, group, call.tensors[0].device, **arguments)


def _fast_all_gather_matmul(call: AllGatherMatmulCall) -> _ag.Result | None:
    A_shard, Bs, dim, group_name, return_A, _ = call
    return _ag.fast_all_gather_matmul(A_shard, Bs, dim, group_name, return_A)


@_fresh
@begins_call
def _slow_all_gather_matmul(call: AllGatherMatmulCall) -> _ag.Result:
    call, group = validation.validate_all_gather_matmul(call)
    _begin(_ag.host.OP, call, group)
    return _ag.run_all_gather_matmul(call, group)


def _fast_matmul_reduce_scatter(call: MatmulReduceScatterCall) -> Tensor | None:
    A, B, reduce_op, dim, group_name, out_dtype, bias, residual, more, _ = call
    if out_dtype is not None:
        return None
    if more:
        return _rs.fast_sum_of_matmuls_reduce_scatter(call)
    return _rs.fast_matmul_reduce_scatter(A, B, reduce_op, dim, group_name, (bias, residual))


@_fresh
@begins_call
def _slow_matmul_reduce_scatter(call: MatmulReduceScatterCall) -> Tensor:
    call, group = validation.validate_matmul_reduce_scatter(call)
    _begin(_rs.host.OP, call, group)
    return _rs.run_matmul_reduce_scatter(call, group)


@_fresh
@begins_call
def _slow_all_gather_scaled_matmul(call: AllGatherScaledMatmulCall) -> _ags.Result:
    call, rows, group = scaled_validation.validate_all_gather_scaled_matmul(call)
    _begin(_ags.host.OP, call, group)
    return _ags.run_all_gather_scaled_matmul(call, rows, group)


@_fresh
@begins_call
def _slow_scaled_matmul_reduce_scatter(call: ScaledMatmulReduceScatterCall) -> Tensor:
    call, rows, group = scaled_validation.validate_scaled_matmul_reduce_scatter(call)
    _begin(_srs.host.OP, call, group)
    return _srs.run_scaled_matmul_reduce_scatter(call, rows, group)


def _fast_all_reduce(call: AllReduceCall) -> Tensor | None:
    return _ar.fast_all_reduce(call.x, call.reduce_op, call.group_name, anything=True)


def _fast_all_reduce_on_device(call: AllReduceCall) -> Tensor | None:
    return _ar.fast_all_reduce(call.x, call.reduce_op, call.group_name)


@_fresh
@begins_call
def _slow_all_reduce(call: AllReduceCall) -> Tensor:
    group = validation.validate_all_reduce(call)
    _begin(_ar.host.OP, call, group)
    return _ar.run_all_reduce(call.x, call.reduce_op, group)


def _fast_all_reduce_in_place(call: AllReduceCall) -> Tensor | None:
    return _ar.fast_all_reduce(call.x, call.reduce_op, call.group_name, call.x, IN_PLACE, anything=True)


def _fast_all_reduce_in_place_on_device(call: AllReduceCall) -> Tensor | None:
    return _ar.fast_all_reduce(call.x, call.reduce_op, call.group_name, call.x, IN_PLACE)


@begins_call
def _slow_all_reduce_in_place(call: AllReduceCall) -> None:
    group, x = validation.validate_all_reduce_in_place(call), call.x
    _begin(IN_PLACE, call, group)
    if x.is_contiguous():
        _ar.run_all_reduce(x, call.reduce_op, group, x, op=IN_PLACE)
    else:
        x.copy_(_ar.run_all_reduce(x, call.reduce_op, group, op=IN_PLACE))
    increment_version(x)  # as on the fast path


def _fast_all_gather(call: AllGatherCall) -> Tensor | None:
    return _gather.fast_all_gather(call.x, call.gather_dim, call.group_name)


@_fresh
@begins_call
def _slow_all_gather(call: AllGatherCall) -> Tensor:
    call, group = validation.validate_all_gather(call)
    _begin(_gather.host.OP, call, group)
    return _gather.run_all_gather(call, group)


def _fast_all_gather_out(call: AllGatherOutCall) -> Tensor | None:
    return _gather.fast_all_gather_out(call.out, call.x, call.gather_dim, call.group_name)


@begins_call
def _slow_all_gather_out(call: AllGatherOutCall) -> None:
    found, group = validation.validate_all_gather_out(call)
    _begin(_gather.host.INTO, found, group)
    _gather.run_all_gather(found, group, call.out)
    increment_version(call.out)  # as on the fast path


def _fast_reduce_scatter(call: ReduceScatterCall) -> Tensor | None:
    return _scatter.fast_reduce_scatter(call.x, call.reduce_op, call.scatter_dim, call.group_name)


@_fresh
@begins_call
def _slow_reduce_scatter(call: ReduceScatterCall) -> Tensor:
    call, group = validation.validate_reduce_scatter(call)
    _begin(_scatter.host.OP, call, group)
    return _scatter.run_reduce_scatter(call, group)


def _fast_reduce_scatter_out(call: ReduceScatterOutCall) -> Tensor | None:
    out, x, reduce_op, dim, group_name, _ = call
    return _scatter.fast_reduce_scatter_out(out, x, reduce_op, dim, group_name)


@begins_call
def _slow_reduce_scatter_out(call: ReduceScatterOutCall) -> None:
    found, group = validation.validate_reduce_scatter_out(call)
    _begin(_scatter.host.INTO, found, group)
    _scatter.run_reduce_scatter(found, group, call.out)
    increment_version(call.out)  # as on the fast path


def _fast_all_reduce_rms_norm(call: AllReduceRmsNormCall) -> tuple[Tensor, Tensor] | None:
    x, residual, weight, eps, group_name, offset, round_sum, _ = call
    norm = _arn.named_norm(eps, offset, round_sum)
    return _arn.fast_all_reduce_rms_norm(x, residual, weight, norm, group_name)


def _fast_all_reduce_layer_norm(call: AllReduceLayerNormCall) -> tuple[Tensor, Tensor] | None:
    x, *operands, eps, group_name, offset, _ = call
    return _aln.fast_all_reduce_layer_norm(x, operands, eps, offset, group_name)


@_fresh
@begins_call
def _slow_all_reduce_norm(call: AllReduceRmsNormCall | AllReduceLayerNormCall) -> tuple[Tensor, Tensor]:
    group, kind = validation.validate_all_reduce_norm(call), call.kind
    _begin(_arn.host.op_of(kind), call, group)
    return _arn.run_all_reduce_norm(call.x, call.residual, call.affine, kind, group)


@_fresh
@begins_call
def _slow_all_reduce_rms_norm_quant(call: AllReduceRmsNormQuantCall) -> _arn.QuantResult:
    found, group = scaled_validation.validate_all_reduce_rms_norm_quant(call)
    _begin(_arn.host.QUANT, found, group)
    return _arn.run_all_reduce_rms_norm_quant(found, group, _arn.name_of_quant(call))


def _fast_matmul_all_reduce(call: MatmulAllReduceCall) -> Tensor | None:
    return _mar.fast_matmul_all_reduce(call.A, call.B, call.reduce_op, call.group_name)


@_fresh
@begins_call
def _slow_matmul_all_reduce(call: MatmulAllReduceCall) -> Tensor:
    group = validation.validate_matmul_all_reduce(call)
    _begin(_mar.host.OP, call, group)
    return _mar.run_matmul_all_reduce(call.A, call.B, call.reduce_op, group)


ALL_GATHER_MATMUL = Implementation(
    schema.all_gather_matmul, AllGatherMatmulCall, _fast_all_gather_matmul, _slow_all_gather_matmul
)
MATMUL_REDUCE_SCATTER = Implementation(
    schema.matmul_reduce_scatter,
    MatmulReduceScatterCall,
    _fast_matmul_reduce_scatter,
    _slow_matmul_reduce_scatter,
)
ALL_GATHER_SCALED_MATMUL = Implementation(
    schema.all_gather_scaled_matmul,
    AllGatherScaledMatmulCall,
    _ags.fast_all_gather_scaled_matmul,
    _slow_all_gather_scaled_matmul,
)
SCALED_MATMUL_REDUCE_SCATTER = Implementation(
    schema.scaled_matmul_reduce_scatter,
    ScaledMatmulReduceScatterCall,
    _srs.fast_scaled_matmul_reduce_scatter,
    _slow_scaled_matmul_reduce_scatter,
)
ALL_REDUCE = Implementation(
    schema.all_reduce, AllReduceCall, _fast_all_reduce, _slow_all_reduce, _fast_all_reduce_on_device
)
ALL_REDUCE_IN_PLACE = Implementation(
    schema.all_reduce_,
    AllReduceCall,
    _fast_all_reduce_in_place,
    _slow_all_reduce_in_place,
    _fast_all_reduce_in_place_on_device,
)
ALL_GATHER = Implementation(schema.all_gather, AllGatherCall, _fast_all_gather, _slow_all_gather)
ALL_GATHER_OUT = Implementation(
    schema.all_gather_out, AllGatherOutCall, _fast_all_gather_out, _slow_all_gather_out
)
REDUCE_SCATTER = Implementation(
    schema.reduce_scatter, ReduceScatterCall, _fast_reduce_scatter, _slow_reduce_scatter
)
REDUCE_SCATTER_OUT = Implementation(
    schema.reduce_scatter_out, ReduceScatterOutCall, _fast_reduce_scatter_out, _slow_reduce_scatter_out
)
ALL_REDUCE_RMS_NORM = Implementation(
    schema.all_reduce_rms_norm, AllReduceRmsNormCall, _fast_all_reduce_rms_norm, _slow_all_reduce_norm
)
ALL_REDUCE_RMS_NORM_QUANT = Implementation(
    schema.all_reduce_rms_norm_quant,
    AllReduceRmsNormQuantCall,
    _arn.fast_all_reduce_rms_norm_quant,
    _slow_all_reduce_rms_norm_quant,
)
ALL_REDUCE_LAYER_NORM = Implementation(
    schema.all_reduce_layer_norm, AllReduceLayerNormCall, _fast_all_reduce_layer_norm, _slow_all_reduce_norm
)
MATMUL_ALL_REDUCE = Implementation(
    schema.matmul_all_reduce, MatmulAllReduceCall, _fast_matmul_all_reduce, _slow_matmul_all_reduce
)
