"""What the Autograd key does with a call that took no fast path: where a gradient is wanted, a function of autograd's.

The graph pass inserts the ops below it, where a call costs one dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...kernels.all_reduce.host import IN_PLACE
from ..dispatch.tensor_guards import has_tangents
from ..ops import all_gather_matmul, all_reduce, all_reduce_rms_norm, matmul_all_reduce, matmul_reduce_scatter
from ..ops.calls import (
    AllGatherMatmulCall,
    AllReduceCall,
    AllReduceRmsNormCall,
    MatmulAllReduceCall,
    MatmulReduceScatterCall,
)
from . import implementations
from .autograd import (
    AllGatherMatmulFunction,
    AllReduceFunction,
    AllReduceRmsNormFunction,
    MatmulAllReduceFunction,
    MatmulReduceScatterFunction,
)
from .unsupported import refuse_derivative_in_transform


def _wants_grad(op: str, tensors: Sequence[Tensor]) -> bool:
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        wants = True  # there is no forward mode: torch refuses it for an autograd.Function that has none
    if wants:
        refuse_derivative_in_transform(op)
    return wants


def differentiable_all_gather_matmul(call: AllGatherMatmulCall) -> all_gather_matmul.Result:
    if not _wants_grad(all_gather_matmul.host.OP, call.tensors):
        result: all_gather_matmul.Result = implementations.ALL_GATHER_MATMUL.run_slow(call)
        return result
    A, *outs = AllGatherMatmulFunction.apply(call, *call.tensors)
    return (A if call.return_A else None), outs


def differentiable_matmul_reduce_scatter(call: MatmulReduceScatterCall) -> Tensor:
    if not _wants_grad(matmul_reduce_scatter.host.OP, call.tensors):
        result: Tensor = implementations.MATMUL_REDUCE_SCATTER.run_slow(call)
        return result
    return MatmulReduceScatterFunction.apply(call, call.bias, call.residual, *call.factors)


def differentiable_all_reduce(call: AllReduceCall) -> Tensor:
    if not _wants_grad(all_reduce.host.OP, call.tensors):
        result: Tensor = implementations.ALL_REDUCE.run_slow(call)
        return result
    if call.reduce_op in ("max", "min"):
        raise ValueError(
            f"reduce_op: is {call.reduce_op!r}, must be 'sum' or 'avg' for an x that requires a gradient"
        )
    return AllReduceFunction.apply(call, call.x)


def refuse_gradient_or_all_reduce_in_place(call: AllReduceCall) -> None:
    if _wants_grad(IN_PLACE, call.tensors):
        raise ValueError("x: requires a gradient, must not where it is overwritten; use one_shot_all_reduce")
    if call.x.is_neg():  # what resolves that below has no way with ops that return nothing
        call.x.copy_(implementations.ALL_REDUCE.dispatch(call))
        return
    implementations.ALL_REDUCE_IN_PLACE.run_slow(call)


def differentiable_all_reduce_rms_norm(call: AllReduceRmsNormCall) -> tuple[Tensor, Tensor]:
    if not _wants_grad(all_reduce_rms_norm.host.OP, call.tensors):
        result: tuple[Tensor, Tensor] = implementations.ALL_REDUCE_RMS_NORM.run_slow(call)
        return result
    return AllReduceRmsNormFunction.apply(call, call.x, call.residual, call.weight)


def differentiable_matmul_all_reduce(call: MatmulAllReduceCall) -> Tensor:
    if not _wants_grad(matmul_all_reduce.host.OP, call.tensors):
        result: Tensor = implementations.MATMUL_ALL_REDUCE.run_slow(call)
        return result
    return MatmulAllReduceFunction.apply(call, *call.tensors)
