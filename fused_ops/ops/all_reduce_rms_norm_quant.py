"""fused_all_reduce_rms_norm_quant: the norm of fused_all_reduce_rms_norm in fp8."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_reduce_rms_norm import QUANT
from ...kernels.all_reduce_rms_norm.quant import SCALE_OPS, QuantKind, default_smallest
from ...kernels.all_reduce_rms_norm.reference import Affine, NormKind
from ...kernels.device.gemm.scaling import FP8
from .. import validation
from ..dispatch.launch_cache import launch_again
from ..dispatch.stand_alone import KINDS
from ..scaled_calls import validate_scale
from .all_reduce_rms_norm import NormOperands, choose_norm, run_norm, validate_all_reduce_norm
from .op import Op

# In fp8, the rows' scales if none is given, and the sums.
QuantResult: TypeAlias = "tuple[Tensor, Tensor | None, Tensor]"


class AllReduceRmsNormQuantCall(NamedTuple):
    """``out_dtype`` and ``smallest`` are there after validation, but for the latter beside a scale."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    group_name: str
    scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_op: str = "reciprocal"
    smallest: float | None = None
    weight_offset: float = 0.0
    round_sum: bool = True
    group_size: int | None = None

    @property
    def operands(self) -> NormOperands:
        return NormOperands(self.x, self.residual, Affine(self.weight), self.scale)

    @property
    def kind(self) -> NormKind:
        assert self.out_dtype is not None, "validation has entered it"
        quant = QuantKind(self.out_dtype, self.scale_op, self.smallest)
        given = self.residual is not None, self.weight.dtype != self.x.dtype
        return NormKind(self.eps, self.weight_offset, self.round_sum, *given, quant=quant)


def validate_quantization(out_dtype: Any, scale_op: Any) -> None:
    """What would not reach the op's own checks."""
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(
            f"out_dtype: is {validation.type_text(out_dtype)}, must be torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if not isinstance(scale_op, str):
        raise TypeError(
            f"scale_op: is {validation.type_text(scale_op)}, must be {validation.one_of(SCALE_OPS)}"
        )


def _validate(call: AllReduceRmsNormQuantCall) -> tuple[AllReduceRmsNormQuantCall, ProcessGroup]:
    """The call with a dtype, and without a scale also with what bounds the rows' scales; the group."""
    group, x, dtype, scale = validate_all_reduce_norm(call), call.x, call.out_dtype, call.scale
    dtype = torch.float8_e4m3fn if dtype is None else dtype
    if dtype not in FP8:
        raise TypeError(f"out_dtype: is {dtype}, must be torch.float8_e4m3fn or torch.float8_e5m2")
    if call.scale_op not in SCALE_OPS:
        raise ValueError(f"scale_op: is {call.scale_op!r}, must be {validation.one_of(SCALE_OPS)}")
    if scale is not None:
        validate_scale("scale", scale, x, "x")
        if scale.numel() != 1:
            raise ValueError(f"scale: has shape {tuple(scale.shape)}, must have one element")
        if call.smallest is not None:
            raise ValueError(f"smallest: is {call.smallest!r}, must be None where a scale is given")
        return call._replace(out_dtype=dtype), group
    if x.shape[-1] == 0:
        raise ValueError("x: has rows of no element, must have some where no scale is given")
    smallest = default_smallest(call.scale_op, dtype) if call.smallest is None else call.smallest
    if not 0 <= smallest <= torch.finfo(torch.float32).max:
        raise ValueError(f"smallest: is {smallest!r}, must be 0 or more, and finite in float32")
    return call._replace(out_dtype=dtype, smallest=float(smallest)), group


def quant_known_by(call: AllReduceRmsNormQuantCall) -> tuple[Hashable, Sequence[Tensor]]:
    """Of a call whose numbers and names are of exactly the types that the op takes."""
    norm = call.eps, call.weight_offset, call.round_sum
    there = call.residual is not None, call.scale is not None
    tensors = [call.x, call.weight] if call.residual is None else [call.x, call.residual, call.weight]
    if call.scale is not None:
        tensors.append(call.scale)
    return (*norm, call.out_dtype, call.scale_op, call.smallest, *there), tensors


def _again(call: AllReduceRmsNormQuantCall) -> QuantResult | None:
    results = launch_again(QUANT, *quant_known_by(call), call.group_name, KINDS)
    return None if results is None else _quant_result(results)


def _quant_result(written: Sequence[Tensor]) -> QuantResult:
    quantized, *scales, sums = written
    return quantized, (scales[0] if scales else None), sums


def _fake(call: AllReduceRmsNormQuantCall, group: ProcessGroup) -> QuantResult:
    x, scales = call.x, None
    if call.scale is None:
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=call.out_dtype), scales, x.new_empty(x.shape)


ALL_REDUCE_RMS_NORM_QUANT = Op(
    "fused_all_reduce_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, str group_name, *,"
    " Tensor? scale=None, ScalarType? out_dtype=None, str scale_op='reciprocal', float? smallest=None,"
    " float weight_offset=0.0, bool round_sum=True, int? group_size=None) -> (Tensor, Tensor?, Tensor)",
    record=AllReduceRmsNormQuantCall,
    validate=_validate,
    fake=_fake,
    kernel="all_reduce_rms_norm_quant",
    choose=choose_norm,
    run=lambda *given: _quant_result(run_norm(*given)),
    known_by=quant_known_by,
    again=_again,
    with_gradient=": a norm in fp8 has none; detach it, or call fused_all_reduce_rms_norm",
)
