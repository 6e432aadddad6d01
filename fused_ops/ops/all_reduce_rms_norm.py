"""fused_all_reduce_rms_norm and fused_all_reduce_layer_norm, and how all norms after an all-reduce run: from tensors to
a kernel, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_reduce_rms_norm.quant import quantize_rows
from ...kernels.all_reduce_rms_norm.reference import Affine, NormKind, add_residual_and_norm
from ...kernels.device.capability import has_clusters
from ...kernels.device.collective.combine import Combined
from ...kernels.device.collective.host_exchange import exchange_layout
from ...kernels.device.comm.ll_exchange import VECTOR
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.all_reduces import NotYet, choose_sum
from ..dispatch.choice import Choice, KernelOf, Known, launch_push, on_host, unfused
from ..dispatch.plan import num_sms, sends_in_turn
from ..dispatch.stand_alone import KINDS
from ..dispatch.workspaces import ALL_REDUCE
from . import all_reduce
from .op import Op


class NormOperands(NamedTuple):
    """What an op is given, where it is there. ``combined``: what the kernel puts x together from; x is its y."""

    x: Tensor
    residual: Tensor | None
    affine: Affine
    scale: Tensor | None = None
    combined: Combined | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """In the kernels' order."""
        of_x, shared = [self.x], None
        if self.combined is not None:
            *of_x, shared = self.combined
        return [t for t in (*of_x, self.residual, *self.affine, self.scale, shared) if t is not None]

    @property
    def shape(self) -> Sequence[int]:
        """Of the sums."""
        return self.x.shape if self.combined is None else self.combined.result_shape

    def normed(self, total: Tensor, kind: NormKind) -> list[Tensor]:
        """What is made of what all ranks' x add up to."""
        normed, sums = add_residual_and_norm(total, self.residual, self.affine, kind)
        if kind.quant is None:
            return [normed, sums]
        quantized, scales = quantize_rows(normed, self.scale, kind.quant)
        return [quantized, sums] if scales is None else [quantized, scales, sums]


class AllReduceRmsNormCall(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    group_name: str
    weight_offset: float = 0.0
    round_sum: bool = True
    group_size: int | None = None

    @property
    def operands(self) -> NormOperands:
        return NormOperands(self.x, self.residual, Affine(self.weight))

    @property
    def kind(self) -> NormKind:
        wide = self.weight.dtype != self.x.dtype
        return NormKind(self.eps, self.weight_offset, self.round_sum, self.residual is not None, wide)


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
    def operands(self) -> NormOperands:
        return NormOperands(self.x, self.residual, Affine(self.weight, self.bias))

    @property
    def kind(self) -> NormKind:
        weight, bias = self.weight, self.bias
        there = weight is not None, bias is not None
        like = bias if weight is None else weight  # both are of one dtype
        wide = like is not None and like.dtype != self.x.dtype
        return NormKind(self.eps, self.weight_offset, True, self.residual is not None, wide, True, *there)


def validate_all_reduce_norm(call: Any) -> ProcessGroup:
    """Of a call of a norm of x; the group."""
    group, x = resolve_group(call.group_name), call.x
    validation.has_dimensions("x", x)
    validation.float_dtype("x", x)
    validate_norm(call, "x")
    return group


def validate_norm(call: Any, of: str) -> None:
    """What a call with ``operands`` adds to what its tensor ``of`` gives, and how it norms that."""
    given: NormOperands = call.operands
    x, sums, (weight, bias) = given.x, given.shape, given.affine
    for name, tensor in (("residual", given.residual), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        shape = sums if name == "residual" else sums[-1:]
        validation.must_have_shape(name, tensor, shape, f" to go with {of}")
        if name == "bias" and weight is not None:
            validation.dtype_like(name, tensor, weight, "weight")
        elif name == "residual" or tensor.dtype != torch.float32:
            validation.dtype_like(
                name, tensor, x, of, " or torch.float32" * (name != "residual" and x.dtype.itemsize == 2)
            )
        validation.same_device(name, tensor, x, of)
    if not call.eps >= 0:
        raise ValueError(f"eps: is {call.eps!r}, must be 0 or more")
    if not abs(call.weight_offset) <= torch.finfo(torch.float32).max:
        raise ValueError(f"weight_offset: is {call.weight_offset!r}, must be finite in float32")
    if weight is None and call.weight_offset != 0:
        raise ValueError(f"weight_offset: is {call.weight_offset!r}, must be 0 where there is no weight")


def choose_norm(call: Any, group: ProcessGroup) -> Choice:
    """The choice for a call with ``operands`` and a ``kind``."""
    given: NormOperands = call.operands
    x, kind, size, (*lead, hidden) = given.x, call.kind, group.size(), given.shape
    rows = prod(lead)
    if x.device.type == "cpu":
        return on_host(exchange_layout(rows * hidden * x.element_size(), size))
    from ...kernels.all_reduce_rms_norm import configs, cuda_kernel

    most_cluster = configs.CLUSTERS[-1] if has_clusters(x.device) else 1
    if (reason := cuda_kernel.why_no_norm_kernel(hidden, x.dtype, size, most_cluster)) is not None:
        # The all-reduce by itself may well be ours.
        reduced = NotYet(x.device, x.dtype, rows * hidden * x.element_size())
        return replace(unfused(reason), programs=choose_sum(reduced, "sum", group).programs)
    ranks, vectors = (size, group.rank()), hidden * x.element_size() // VECTOR
    config = configs.choose_all_reduce_rms_norm(rows, vectors, size, num_sms(x.device), most_cluster)

    def made(place: Any) -> Any:
        how = replace(config, in_turn=sends_in_turn(place.heap))
        return cuda_kernel.AllReduceRmsNormLauncher(place, rows, hidden, x.dtype, kind, how)

    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=configs.all_reduce_rms_norm_layout(rows, vectors, size, config),
        predicted_us=configs.estimate_all_reduce_rms_norm_us(rows, vectors, size, config),
        programs=lambda: [cuda_kernel.norm_program(vectors, x.dtype, kind, config, ranks)],
        how=KernelOf((rows, hidden, x.dtype, kind), made),
    )


def run_norm(choice: Choice, where: Heap | None, call: Any, group: ProcessGroup) -> tuple[Tensor, ...]:
    """The results of such a call as kernels write them."""
    given, kind = call.operands, call.kind
    op, x, quant = kind.op, given.x, kind.quant
    if where is None or choice.algorithm != "push":
        x = x if given.combined is None else given.combined.total()
        total = all_reduce.sum_without_kernel(choice, where, x, "sum", group, op)
        return (*map(Tensor.contiguous, given.normed(total, kind)),)
    shape, results = given.shape, list[tuple[Sequence[int], Any]]()
    results.append((shape, x.dtype if quant is None else quant.out_dtype))
    if quant is not None and quant.dynamic:
        results.append(((*shape[:-1], 1), torch.float32))
    return (*launch_push(op, choice, where, given.tensors, [*results, (shape, x.dtype)]),)


class NormFunction(torch.autograd.Function):
    """A call of a norm of x, with its tensors: x, residual, weight and bias."""

    @staticmethod
    def forward(ctx: Any, op: Op, call: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        like = given[2] if given[2] is not None else given[-1]
        layer_norm, dtype = isinstance(call, AllReduceLayerNormCall), None if like is None else like.dtype
        ctx.norm = (call.eps, call.weight_offset, layer_norm, dtype)
        ctx.group = call.group_name, call.group_size
        normed, sums = op.run_below_autograd(call)
        ctx.save_for_backward(sums, given[2] if any(ctx.needs_input_grad[2:4]) else None)
        return normed, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums, weight = ctx.saved_tensors
        _, _, of_x, of_residual, *of_affine = ctx.needs_input_grad
        total, of_weight, of_bias = norm_gradients(
            sums, weight, grads, ctx.norm, (of_x or of_residual, *of_affine, False)
        )
        grad_x = None
        if of_x:
            name, size = ctx.group
            grad_x = torch.ops.weft.one_shot_all_reduce(total, "sum", name, group_size=size)
        found = None, None, grad_x, total if of_residual else None, of_weight, of_bias
        return found[: len(ctx.needs_input_grad)]


#: Of a norm: eps, what is added to the weight, whether the mean is subtracted; and the dtype of weight and bias.
Norm: TypeAlias = tuple[float, float, bool, torch.dtype | None]


def norm_gradients(
    sums: Tensor, weight: Tensor | None, grads: Sequence[Tensor], norm: Norm, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of the sums, the weight and the bias, those that are wanted; ``grads``: of the norm and of the sums."""
    (grad_normed, grad_sums), (eps, offset, subtract_mean, dtype) = grads, norm
    of_sums, of_weight, of_bias, *_ = wanted
    wide, grad = sums.float(), grad_normed.float()
    if subtract_mean:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit, total, grad_weight, grad_bias = wide * scale, None, None, None
    if of_sums:
        through = grad
        if weight is not None:
            through = grad * (weight if offset == 0 else weight.float() + offset)
        centred = through - through.mean(-1, keepdim=True) if subtract_mean else through
        inner = centred - unit * (through * unit).mean(-1, keepdim=True)
        total = (scale * inner + grad_sums).to(sums.dtype)
    if of_weight:
        grad_weight = (grad * unit).sum_to_size(sums.shape[-1:]).to(dtype)
    if of_bias:
        grad_bias = grad.sum_to_size(sums.shape[-1:]).to(dtype)
    return total, grad_weight, grad_bias


def norm_known_by(call: AllReduceRmsNormCall) -> Known:
    x, residual, weight, eps, _, offset, round_sum, _ = call
    tensors = (x, weight) if residual is None else (x, residual, weight)
    return (eps if round_sum and offset == 0 else (eps, offset, round_sum)), tensors


def layer_norm_known_by(call: AllReduceLayerNormCall) -> Known:
    x, residual, weight, bias, eps, _, offset, _ = call
    there = residual is not None, weight is not None, bias is not None
    return (eps, offset, *there), [t for t in (x, residual, weight, bias) if t is not None]


def _norm(schema: str, record: Callable[..., Any], known_by: Callable[[Any], Known]) -> Op:
    op: Op = Op(
        schema,
        record=record,
        validate=lambda call: (call, validate_all_reduce_norm(call)),
        fake=lambda call, group: (call.x.new_empty(call.x.shape), call.x.new_empty(call.x.shape)),
        kernel="all_reduce_rms_norm",
        choose=choose_norm,
        run=run_norm,
        known_by=known_by,
        kinds=KINDS,
        with_gradient=lambda call: NormFunction.apply(op, call, *call[: call._fields.index("eps")]),
    )
    return op


ALL_REDUCE_RMS_NORM = _norm(
    "fused_all_reduce_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, str group_name, *,"
    " float weight_offset=0.0, bool round_sum=True, int? group_size=None) -> (Tensor, Tensor)",
    AllReduceRmsNormCall,
    norm_known_by,
)
ALL_REDUCE_LAYER_NORM = _norm(
    "fused_all_reduce_layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " str group_name, *, float weight_offset=0.0, int? group_size=None) -> (Tensor, Tensor)",
    AllReduceLayerNormCall,
    layer_norm_known_by,
)
