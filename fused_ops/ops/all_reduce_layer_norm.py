"""fused_all_reduce_layer_norm: its call, fast path and gradient. It runs as fused_all_reduce_rms_norm does."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.all_reduce_rms_norm import LAYER_NORM
from ...kernels.all_reduce_rms_norm.reference import Affine, NormKind
from ..dispatch import launch_cache
from ..dispatch.workspaces import ALL_REDUCE
from . import all_reduce_rms_norm
from .op import Op


class AllReduceLayerNormCall(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    group_name: str
    weight_offset: float = 0.0
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, *self.affine) if t is not None]

    @property
    def affine(self) -> Affine:
        return Affine(self.weight, self.bias)

    @property
    def kind(self) -> NormKind:
        weight, bias = self.weight, self.bias
        there = weight is not None, bias is not None
        like = bias if weight is None else weight  # both are of one dtype
        wide = like is not None and like.dtype != self.x.dtype
        return NormKind(self.eps, self.weight_offset, True, self.residual is not None, wide, True, *there)


def fast_all_reduce_layer_norm(call: AllReduceLayerNormCall) -> tuple[Tensor, Tensor] | None:
    """As the op, if such a call was made before; else None, and nothing happened. Tensors may be anything."""
    x, residual, weight, bias, eps, group_name, weight_offset, _ = call
    there = residual is not None, weight is not None, bias is not None
    name = all_reduce_rms_norm.named_layer_norm(eps, weight_offset, *there)
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    results = launch_cache.launch_again(LAYER_NORM, name, tensors, group_name, (ALL_REDUCE,))
    return None if results is None else (results[0], results[1])


class AllReduceLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllReduceLayerNormCall, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.eps, ctx.group_name, ctx.group_size = call.eps, call.group_name, call.group_size
        ctx.offset, ctx.dtypes = call.weight_offset, [None if t is None else t.dtype for t in call.affine]
        normed, sums = ALL_REDUCE_LAYER_NORM.run_below_autograd(call)
        ctx.save_for_backward(sums, call.weight if any(ctx.needs_input_grad[1:3]) else None)
        return normed, sums

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor, grad_sums: Tensor) -> Any:
        sums, weight = ctx.saved_tensors
        _, of_x, of_residual, of_weight, of_bias = ctx.needs_input_grad
        wide = sums.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scale = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        unit, grad = wide * scale, grad_normed.float()
        grad_x = total = grad_weight = grad_bias = None
        if of_x or of_residual:
            through = grad
            if weight is not None:
                through = grad * (weight if ctx.offset == 0 else weight.float() + ctx.offset)
            inner = through - through.mean(-1, keepdim=True) - unit * (through * unit).mean(-1, keepdim=True)
            total = (scale * inner + grad_sums).to(sums.dtype)
            if of_x:
                grad_x = torch.ops.weft.one_shot_all_reduce(
                    total, "sum", ctx.group_name, group_size=ctx.group_size
                )
        if of_weight:
            grad_weight = (grad * unit).sum_to_size(sums.shape[-1:]).to(ctx.dtypes[0])
        if of_bias:
            grad_bias = grad.sum_to_size(sums.shape[-1:]).to(ctx.dtypes[1])
        return None, grad_x, total if of_residual else None, grad_weight, grad_bias


ALL_REDUCE_LAYER_NORM = Op(
    "fused_all_reduce_layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " str group_name, *, float weight_offset=0.0, int? group_size=None) -> (Tensor, Tensor)",
    record=AllReduceLayerNormCall,
    validate=lambda call: (call, all_reduce_rms_norm.validate_all_reduce_norm(call)),
    fake=all_reduce_rms_norm.fake_norm,
    kernel="all_reduce_rms_norm",
    sends_nothing=all_reduce_rms_norm.norm_sends_nothing,
    choose=all_reduce_rms_norm.choose_norm_call,
    run=all_reduce_rms_norm.run_norm_call,
    fast=fast_all_reduce_layer_norm,
    known_by=all_reduce_rms_norm.norm_is_known_by,
    with_gradient=lambda call: AllReduceLayerNormFunction.apply(call, call.x, call.residual, *call.affine),
)
