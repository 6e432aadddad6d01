"""fused_moe_combine_all_reduce_rms_norm: the norm of fused_all_reduce_rms_norm after what is put together."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_reduce_rms_norm import COMBINE as OP
from ....kernels.all_reduce_rms_norm.reference import Affine, NormKind
from ....kernels.device.collective.combine import Combined
from ....symm_mem import resolve_group
from ...dispatch.choice import Known
from ...dispatch.stand_alone import KINDS
from ..all_reduce_rms_norm import NormOperands, choose_norm, norm_gradients, run_norm, validate_norm
from ..gradients import refuse_second_gradient
from ..op import Op
from .combine import combined_of, save_combined, validate_combined


class CombineRmsNormCall(NamedTuple):
    y: Tensor
    slots: Tensor
    weights: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    group_name: str
    shared: Tensor | None = None
    weight_offset: float = 0.0
    round_sum: bool = True
    group_size: int | None = None

    @property
    def operands(self) -> NormOperands:
        return NormOperands(self.y, self.residual, Affine(self.weight), combined=combined_of(self))

    @property
    def kind(self) -> NormKind:
        wide = self.weight.dtype != self.y.dtype
        found = NormKind(self.eps, self.weight_offset, self.round_sum, self.residual is not None, wide)
        return found._replace(combine=combined_of(self).shape)


def _validate(call: CombineRmsNormCall) -> tuple[CombineRmsNormCall, ProcessGroup]:
    group = resolve_group(call.group_name)
    validate_combined(combined_of(call))
    validate_norm(call, "y")
    return call, group


def _known_by(call: CombineRmsNormCall) -> Known:
    there = call.shared is not None, call.residual is not None
    given = call.y, call.slots, call.weights, call.residual, call.weight, call.shared
    tensors = [t for t in given if t is not None]
    return (call.eps, call.weight_offset, call.round_sum, *there), tensors


class CombineRmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CombineRmsNormCall, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.norm = call.eps, call.weight_offset, False, call.weight.dtype
        ctx.group = call.group_name, call.group_size
        normed, sums = MOE_COMBINE_ALL_REDUCE_RMS_NORM.run_below_autograd(call)
        save_combined(ctx, call, ctx.needs_input_grad[1:4], sums, call.weight)
        return normed, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_second_gradient(OP)
        *combined, sums, weight = ctx.saved_tensors
        wanted, (of_residual, of_weight) = ctx.needs_input_grad[1:4], ctx.needs_input_grad[4:]
        of_sums = any(wanted) or of_residual
        total, grad_weight, _ = norm_gradients(sums, weight, grads, ctx.norm, (of_sums, of_weight, False))
        found: tuple[Any, ...] = (None, None, None)
        if any(wanted):
            name, size = ctx.group
            whole = torch.ops.weft.one_shot_all_reduce(total, "sum", name, group_size=size)
            found = Combined(*combined).gradients(whole, wanted)
        return None, *found, total if of_residual else None, grad_weight


MOE_COMBINE_ALL_REDUCE_RMS_NORM = Op(
    "fused_moe_combine_all_reduce_rms_norm(Tensor y, Tensor slots, Tensor weights, Tensor? residual, Tensor weight,"
    " float eps, str group_name, *, Tensor? shared=None, float weight_offset=0.0, bool round_sum=True,"
    " int? group_size=None) -> (Tensor, Tensor)",
    record=CombineRmsNormCall,
    validate=_validate,
    fake=lambda call, group: tuple(call.y.new_empty(combined_of(call).result_shape) for _ in range(2)),
    kernel="all_reduce_rms_norm",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=choose_norm,
    run=run_norm,
    known_by=_known_by,
    kinds=KINDS,
    with_gradient=lambda call: CombineRmsNormFunction.apply(
        call, call.y, call.weights, call.shared, call.residual, call.weight
    ),
)
