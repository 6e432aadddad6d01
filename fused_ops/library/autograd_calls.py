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
from ..ops import (
    all_gather,
    all_gather_matmul,
    all_gather_scaled_matmul,
    all_reduce,
    all_reduce_rms_norm,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
    scaled_matmul_reduce_scatter,
)
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
from . import implementations, scaled_validation
from .autograd import (
    AllGatherFunction,
    AllGatherMatmulFunction,
    AllReduceFunction,
    AllReduceLayerNormFunction,
    AllReduceRmsNormFunction,
    MatmulAllReduceFunction,
    MatmulReduceScatterFunction,
    ReduceScatterFunction,
)
from .unsupported import refuse_derivative_in_transform

_PRODUCTS = (
    "products of given fp8 numbers have none; detach it, or call float8_all_gather_matmul or "
    "float8_matmul_reduce_scatter, which cast to fp8 themselves"
)


def _wants_grad(op: str, tensors: Sequence[Tensor]) -> bool:
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        wants = True  # there is no forward mode: torch refuses it for an autograd.Function that has none
    if wants:
        refuse_derivative_in_transform(op)
    return wants


def _refuse_without_gradient(reduce_op: str) -> None:
    if reduce_op in ("max", "min"):
        raise ValueError(
            f"reduce_op: is {reduce_op!r}, must be 'sum' or 'avg' for an x that requires a gradient"
        )


def _refuse_gradient_into(op: str, out: Tensor, x: Tensor) -> None:
    for name, tensor in (("out", out), ("x", x)):
        if _wants_grad(op, [tensor]):
            raise ValueError(
                f"{name}: requires a gradient, must not where the result is written to a given tensor"
            )


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
    _refuse_without_gradient(call.reduce_op)
    return AllReduceFunction.apply(call, call.x)


def refuse_gradient_or_all_reduce_in_place(call: AllReduceCall) -> None:
    if _wants_grad(IN_PLACE, call.tensors):
        raise ValueError("x: requires a gradient, must not where it is overwritten; use one_shot_all_reduce")
    if call.x.is_neg():  # what resolves that below has no way with ops that return nothing
        call.x.copy_(implementations.ALL_REDUCE.dispatch(call))
        return
    implementations.ALL_REDUCE_IN_PLACE.run_slow(call)


def differentiable_all_gather(call: AllGatherCall) -> Tensor:
    if not _wants_grad(all_gather.host.OP, call.tensors):
        result: Tensor = implementations.ALL_GATHER.run_slow(call)
        return result
    return AllGatherFunction.apply(call, call.x)


def refuse_gradient_or_all_gather_out(call: AllGatherOutCall) -> None:
    _refuse_gradient_into(all_gather.host.INTO, call.out, call.x)
    if call.out.is_neg() or call.x.is_neg():  # as in place
        call.out.copy_(implementations.ALL_GATHER.dispatch(call.without_out))
        return
    implementations.ALL_GATHER_OUT.run_slow(call)


def differentiable_reduce_scatter(call: ReduceScatterCall) -> Tensor:
    if not _wants_grad(reduce_scatter.host.OP, call.tensors):
        result: Tensor = implementations.REDUCE_SCATTER.run_slow(call)
        return result
    _refuse_without_gradient(call.reduce_op)
    return ReduceScatterFunction.apply(call, call.x)


def refuse_gradient_or_reduce_scatter_out(call: ReduceScatterOutCall) -> None:
    _refuse_gradient_into(reduce_scatter.host.INTO, call.out, call.x)
    if call.out.is_neg() or call.x.is_neg():
        call.out.copy_(implementations.REDUCE_SCATTER.dispatch(call.without_out))
        return
    implementations.REDUCE_SCATTER_OUT.run_slow(call)


def differentiable_all_reduce_rms_norm(call: AllReduceRmsNormCall) -> tuple[Tensor, Tensor]:
    if not _wants_grad(all_reduce_rms_norm.host.OP, call.tensors):
        result: tuple[Tensor, Tensor] = implementations.ALL_REDUCE_RMS_NORM.run_slow(call)
        return result
    return AllReduceRmsNormFunction.apply(call, call.x, call.residual, call.weight)


def differentiable_all_reduce_layer_norm(call: AllReduceLayerNormCall) -> tuple[Tensor, Tensor]:
    if not _wants_grad(all_reduce_rms_norm.host.LAYER_NORM, call.tensors):
        result: tuple[Tensor, Tensor] = implementations.ALL_REDUCE_LAYER_NORM.run_slow(call)
        return result
    return AllReduceLayerNormFunction.apply(call, call.x, call.residual, *call.affine)


def refuse_gradient_or_all_reduce_rms_norm_quant(
    call: AllReduceRmsNormQuantCall,
) -> all_reduce_rms_norm.QuantResult:
    if _wants_grad(all_reduce_rms_norm.host.QUANT, call.tensors):
        scaled_validation.validate_all_reduce_rms_norm_quant(call)
        _refuse_gradient(call, "a norm in fp8 has none; detach it, or call fused_all_reduce_rms_norm")
    result: all_reduce_rms_norm.QuantResult = implementations.ALL_REDUCE_RMS_NORM_QUANT.run_slow(call)
    return result


def differentiable_matmul_all_reduce(call: MatmulAllReduceCall) -> Tensor:
    if not _wants_grad(matmul_all_reduce.host.OP, call.tensors):
        result: Tensor = implementations.MATMUL_ALL_REDUCE.run_slow(call)
        return result
    return MatmulAllReduceFunction.apply(call, *call.tensors)


def refuse_gradient_or_all_gather_scaled_matmul(
    call: AllGatherScaledMatmulCall,
) -> all_gather_scaled_matmul.Result:
    if _wants_grad(all_gather_scaled_matmul.host.OP, call.tensors):
        scaled_validation.validate_all_gather_scaled_matmul(call)
        _refuse_gradient(call)
    result: all_gather_scaled_matmul.Result = implementations.ALL_GATHER_SCALED_MATMUL.run_slow(call)
    return result


def refuse_gradient_or_scaled_matmul_reduce_scatter(call: ScaledMatmulReduceScatterCall) -> Tensor:
    if _wants_grad(scaled_matmul_reduce_scatter.host.OP, call.tensors):
        scaled_validation.validate_scaled_matmul_reduce_scatter(call)
        _refuse_gradient(call)
    result: Tensor = implementations.SCALED_MATMUL_REDUCE_SCATTER.run_slow(call)
    return result


def _refuse_gradient(call: OpArguments, why: str = _PRODUCTS) -> None:
    """The first argument that requires one; a tangent is torch's to refuse."""
    for field in call._fields:
        given = getattr(call, field)
        several = isinstance(given, list | tuple)
        for i, tensor in enumerate(given if several else [given]):
            if isinstance(tensor, Tensor) and (tensor.requires_grad or has_tangents()):
                name = f"{field}[{i}]" if several else field
                raise ValueError(f"{name}: requires a gradient, must not: {why}")
