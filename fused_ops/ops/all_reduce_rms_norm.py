"""fused_all_reduce_rms_norm, and how all norms after an all-reduce run: from tensors to a kernel, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_reduce_rms_norm import OP
from ...kernels.all_reduce_rms_norm.quant import quantize_rows
from ...kernels.all_reduce_rms_norm.reference import Affine, NormKind, add_residual_and_norm
from ...kernels.device.capability import has_clusters
from ...kernels.device.collective.combine import Combined
from ...kernels.device.collective.host_exchange import exchange_layout
from ...kernels.device.comm.ll_exchange import VECTOR
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch import launch_cache
from ..dispatch.all_reduces import NotYet, choose_sum
from ..dispatch.choice import Choice, KernelOf, launch_push, on_host, unfused
from ..dispatch.plan import num_sms
from ..dispatch.workspaces import ALL_REDUCE
from . import all_reduce
from .op import Op


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
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, self.weight) if t is not None]

    @property
    def affine(self) -> Affine:
        return Affine(self.weight)

    @property
    def kind(self) -> NormKind:
        wide = self.weight.dtype != self.x.dtype
        return NormKind(self.eps, self.weight_offset, self.round_sum, self.residual is not None, wide)


class AddedCall(Protocol):
    """What a norm adds and multiplies by."""

    @property
    def residual(self) -> Tensor | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_offset(self) -> float: ...
    @property
    def group_name(self) -> str: ...
    @property
    def affine(self) -> Affine: ...
    @property
    def kind(self) -> NormKind: ...


class NormCall(AddedCall, Protocol):
    """A call of a norm of x."""

    @property
    def x(self) -> Tensor: ...


def validate_all_reduce_norm(call: NormCall) -> ProcessGroup:
    """The group."""
    group, x = resolve_group(call.group_name), call.x
    if x.dim() < 1:
        raise ValueError("x: has no dimension, must have 1 or more")
    validation.float_dtype("x", x)
    validate_norm(call, "x", x, x.shape)
    return group


def validate_norm(call: AddedCall, of: str, x: Tensor, sums: Sequence[int]) -> None:
    """What is added to what x, or ``of``, gives, of the shape of ``sums``, and how that is normed."""
    weight, bias = call.affine
    for name, tensor in (("residual", call.residual), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        shape = tuple(sums if name == "residual" else sums[-1:])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: has shape {tuple(tensor.shape)}, must have {shape} to go with {of}")
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


def named_norm(eps: float, weight_offset: float, round_sum: bool) -> float | tuple[float, float, bool]:
    """By what the fast path knows a norm."""
    return eps if round_sum and weight_offset == 0 else (eps, weight_offset, round_sum)


def named_layer_norm(eps: float, weight_offset: float, *given: bool) -> tuple[float, ...]:
    """By what it knows a LayerNorm: its numbers, and whether there are residual, weight and bias."""
    return eps, weight_offset, *given


def name_of_norm(kind: NormKind) -> float | tuple[float, ...]:
    """By what the fast path knows what was computed."""
    if kind.subtract_mean:
        return named_layer_norm(kind.eps, kind.weight_offset, kind.residual, kind.weight, kind.bias)
    return named_norm(kind.eps, kind.weight_offset, kind.round_sum)


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


def choose_norm(x: Tensor, sums: Sequence[int], kind: NormKind, group: ProcessGroup) -> Choice:
    """The choice for a norm of such x, or of what it is part of, which has the shape of ``sums``."""
    size, hidden = group.size(), sums[-1]
    rows = prod(sums[:-1])
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
    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=configs.all_reduce_rms_norm_layout(rows, vectors, size, config),
        predicted_us=configs.estimate_all_reduce_rms_norm_us(rows, vectors, size, config),
        programs=lambda: [cuda_kernel.norm_program(vectors, x.dtype, kind, config, ranks)],
        how=KernelOf(
            (rows, hidden, x.dtype, kind),
            lambda place: cuda_kernel.AllReduceRmsNormLauncher(place, rows, hidden, x.dtype, kind, config),
        ),
    )


def run_norm(
    choice: Choice,
    where: Heap | None,
    given: NormOperands,
    kind: NormKind,
    name: Callable[[], Hashable],
    group: ProcessGroup,
) -> list[Tensor]:
    """The results as kernels write them; ``name`` returns that by which the launch cache knows the call."""
    op, x, quant = kind.op, given.x, kind.quant
    if where is None or choice.algorithm != "push":
        x = x if given.combined is None else given.combined.total()
        total = all_reduce.sum_without_kernel(choice, where, x, "sum", group, op)
        return [t.contiguous() for t in given.normed(total, kind)]
    shape, results = given.shape, list[tuple[Sequence[int], Any]]()
    results.append((shape, x.dtype if quant is None else quant.out_dtype))
    if quant is not None and quant.dynamic:
        results.append(((*shape[:-1], 1), torch.float32))
    return launch_push(op, choice, where, given.tensors, [*results, (shape, x.dtype)], name())


def fake_norm(call: NormCall, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    return call.x.new_empty(call.x.shape), call.x.new_empty(call.x.shape)


class AllReduceRmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: AllReduceRmsNormCall, x: Tensor, residual: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.norm, ctx.group_name, ctx.group_size = (
            (call.eps, call.weight_offset),
            call.group_name,
            call.group_size,
        )
        ctx.weight_dtype = weight.dtype
        normed, sums = ALL_REDUCE_RMS_NORM.run_below_autograd(call)
        ctx.save_for_backward(sums, weight if any(ctx.needs_input_grad[1:3]) else None)
        return normed, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums, weight = ctx.saved_tensors
        of_x, of_residual, of_weight = ctx.needs_input_grad[1:]
        total, grad_weight = norm_gradients(sums, weight, grads, ctx.norm, of_weight)
        grad_x = None
        if of_x:
            grad_x = torch.ops.weft.one_shot_all_reduce(
                total, "sum", ctx.group_name, group_size=ctx.group_size
            )
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return None, grad_x, total if of_residual else None, grad_weight


def norm_gradients(
    sums: Tensor, weight: Tensor | None, grads: Sequence[Tensor], norm: tuple[float, float], of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Of the sums, if there is the weight, and of the weight in float32, if it is wanted; ``grads``: of the norm and of
    the sums; ``norm``: eps and what is added to the weight."""
    (eps, offset), (grad_normed, grad_sums) = norm, grads
    wide, grad = sums.float(), grad_normed.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit, total = wide * scale, None
    if weight is not None:
        through = grad * (weight if offset == 0 else weight.float() + offset)
        inner = scale * (through - unit * (through * unit).mean(-1, keepdim=True))
        total = (inner + grad_sums).to(sums.dtype)
    return total, (grad * unit).sum_to_size(sums.shape[-1:]) if of_weight else None


def _fast(call: AllReduceRmsNormCall) -> tuple[Tensor, Tensor] | None:
    norm = named_norm(call.eps, call.weight_offset, call.round_sum)
    tensors = (call.x, call.weight) if call.residual is None else call[:3]
    results = launch_cache.launch_again(OP, norm, tensors, call.group_name, (ALL_REDUCE,))
    return None if results is None else (results[0], results[1])


def choose_norm_call(call: NormCall, group: ProcessGroup) -> Choice:
    return choose_norm(call.x, call.x.shape, call.kind, group)


def run_norm_call(
    choice: Choice, where: Heap | None, call: NormCall, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    operands, kind = NormOperands(call.x, call.residual, call.affine), call.kind
    normed, sums = run_norm(choice, where, operands, kind, partial(name_of_norm, kind), group)
    return normed, sums


def norm_sends_nothing(call: NormCall, group: ProcessGroup) -> bool:
    return call.x.numel() == 0


def norm_is_known_by(call: Any, group: ProcessGroup) -> tuple[Hashable, Sequence[Tensor]]:
    return name_of_norm(call.kind), call.tensors


ALL_REDUCE_RMS_NORM = Op(
    "fused_all_reduce_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, str group_name, *,"
    " float weight_offset=0.0, bool round_sum=True, int? group_size=None) -> (Tensor, Tensor)",
    record=AllReduceRmsNormCall,
    validate=lambda call: (call, validate_all_reduce_norm(call)),
    fake=fake_norm,
    kernel="all_reduce_rms_norm",
    sends_nothing=norm_sends_nothing,
    choose=choose_norm_call,
    run=run_norm_call,
    fast=_fast,
    known_by=norm_is_known_by,
    with_gradient=lambda call: AllReduceRmsNormFunction.apply(call, call.x, call.residual, call.weight),
)
