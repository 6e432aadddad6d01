"""weft::grouped_matmul: products of rows with the experts that they are sorted by; ``experts.grouped_matmul`` documents
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ....kernels.device.capability import has_tensor_memory, why_no_kernel_on
from ....kernels.device.gemm.operands import is_transposed
from ....kernels.grouped_matmul.configs import MOST_EXPERTS, choose_grouped, tiles_for
from ....kernels.grouped_matmul.reference import (
    activated,
    ends_within,
    experts_of_rows,
    reference_grouped_matmul,
)
from ... import validation
from ...dispatch.plan import num_sms
from ..gradients import refuse_second_gradient
from ..op import define

_ops = torch.ops.weft
_UNIT = 8  # numbers of 16 bits that TMA and torch's grouped product want rows to be a multiple of
_MOST_PREPARED = 256


def validate_grouped(
    A: Tensor, B: Tensor, offs: Tensor, rows: Tensor | None, bias: Tensor | None, swiglu: bool = False
) -> None:
    validation.float_dtype("A", A)
    if A.dim() != 2:
        raise ValueError(f"A: has {A.dim()} dimensions, must be a matrix [T, K]")
    validate_experts("B", B, A, "A", swiglu=swiglu)
    validate_index("offs", offs, A, "A")
    if offs.shape[0] != B.shape[0]:
        raise ValueError(f"offs: has {offs.shape[0]} elements, must have {B.shape[0]}, as B has experts")
    if rows is not None:
        validate_index("rows", rows, A, "A")
        if A.shape[0] == 0 and rows.shape[0] != 0:
            raise ValueError(f"A: has no rows, must have those that {rows.shape[0]} rows name")
    if bias is not None:
        validate_experts_bias("bias", bias, B, A, "A")


def validate_experts(name: str, B: Tensor, A: Tensor, like_name: str, *, swiglu: bool = False) -> None:
    """B is [E, K, N], of matrices that a matrix A can be multiplied with. ``swiglu``: of gate and up."""
    k = A.shape[1]
    if B.dim() != 3 or B.shape[1] != k:
        raise ValueError(
            f"{name}: has shape {tuple(B.shape)}, must be [E, {k}, N]: {like_name} has {k} columns"
        )
    validation.like_tensor(name, B, A, like_name)
    if not 1 <= B.shape[0] <= MOST_EXPERTS:
        raise ValueError(f"{name}: has {B.shape[0]} experts, must have from 1 to {MOST_EXPERTS}")
    for dim, size, unit in (("K", k, _UNIT), ("N", B.shape[2], _UNIT * (1 + swiglu))):
        if size == 0 or size % unit:
            of_both = ", gate and up" if unit > _UNIT else ""
            raise ValueError(
                f"{name}: has {dim} = {size}, must be a multiple of {unit} from {unit} on{of_both}"
            )


def validate_experts_bias(name: str, bias: Tensor, B: Tensor, A: Tensor, like_name: str) -> None:
    if tuple(bias.shape) != (B.shape[0], B.shape[2]):
        raise ValueError(f"{name}: has shape {tuple(bias.shape)}, must be [{B.shape[0]}, {B.shape[2]}]")
    validation.like_tensor(name, bias, A, like_name)


def validate_index(name: str, index: Tensor, A: Tensor, like_name: str) -> None:
    if index.dtype != torch.int32:
        raise TypeError(f"{name}: is {index.dtype}, must be int32")
    if index.dim() != 1:
        raise ValueError(f"{name}: has {index.dim()} dimensions, must have 1")
    validation.same_device(name, index, A, like_name)


Term: TypeAlias = tuple[Tensor, Tensor | None]  # each B and its bias


def multiply(
    A: Tensor, terms: Sequence[Term], offs: Tensor, rows: Tensor | None, *, swiglu: bool = False
) -> list[Tensor]:
    """As the op for each B [E, K, N_i], on the current device; the arguments are what validation has seen."""
    by_kernel = A.device.type == "cuda" and A.dtype != torch.float32
    if not by_kernel or why_no_kernel_on("grouped_matmul", A.device) is not None:
        found = [reference_grouped_matmul(A, B, offs, rows, bias) for B, bias in terms]
        return [activated(y, swiglu=swiglu) for y in found]
    from ....kernels.grouped_matmul.take_rows import take_rows

    A, terms = as_the_kernel_takes(A, terms)
    offs = offs.contiguous()
    if rows is not None:
        taken = A.new_empty(rows.shape[0], A.shape[1])
        take_rows(A, rows.contiguous(), offs, taken)
        A = taken
    return multiply_in_order(A, terms, offs, swiglu=swiglu)


def as_the_kernel_takes(A: Tensor, terms: Sequence[Term]) -> tuple[Tensor, list[Term]]:
    """What lies otherwise is copied, also what is contiguous and begins at another address."""
    from ....kernels.grouped_matmul.cuda_kernel import lies_well

    def taken(x: Tensor) -> Tensor:
        return x if lies_well(x) else x.clone(memory_format=torch.contiguous_format)

    def added(x: Tensor | None) -> Tensor | None:  # the kernel reads two elements at once
        if x is None or (x.is_contiguous() and x.data_ptr() % 4 == 0):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    found: list[Term] = [(B if lies_well(B.mT) else taken(B), added(bias)) for B, bias in terms]
    return taken(A), found


def multiply_in_order(A: Tensor, terms: Sequence[Term], offs: Tensor, *, swiglu: bool) -> list[Tensor]:
    """By one launch where the Bs may share it, else one for each; the operands as the kernel takes them."""
    if A.shape[0] == 0:
        return [A.new_empty(0, B.shape[2] // (1 + swiglu)) for B, _ in terms]
    outs = list[Tensor]()
    for some, gated, kernel in _launchers(A, terms, swiglu):
        made = [A.new_empty(A.shape[0], B.shape[2] // (1 + gated)) for B, _ in terms[some]]
        kernel.launch(A, terms[some], made, offs)
        outs += [activated(y, swiglu=swiglu and not gated) for y in made]
    return outs


def prepare_groups(A: Tensor, terms: Sequence[Term], *, swiglu: bool) -> None:
    """What ``multiply_in_order`` launches for such operands in their order, compiled and loaded."""
    for _ in _launchers(A, terms, swiglu):
        pass


def _launchers(A: Tensor, terms: Sequence[Term], swiglu: bool) -> Iterator[tuple[slice, bool, Any]]:
    """Each with its part of the terms, and whether it is one of SwiGLU."""
    from ....kernels.grouped_matmul.cuda_kernel import may_share

    at_once = len(terms) if may_share([B for B, _ in terms]) else 1
    for first in range(0, len(terms), at_once):
        some = slice(first, first + at_once)
        of_bs = tuple((B.shape, B.stride()) for B, _ in terms[some])
        gated = swiglu and is_transposed(terms[first][0][0])
        layout = (A.shape, A.stride()), of_bs, A.dtype, A.device
        yield some, gated, _prepared(layout, num_sms(A.device), gated)


@lru_cache(_MOST_PREPARED)
def _prepared(layout: tuple[Any, ...], sms: int, gated: bool) -> Any:
    """The launcher of such operands, which lie as ``layout`` says; in the current context."""
    from ....kernels.grouped_matmul.cuda_kernel import GroupedMatmul

    of_a, of_bs, dtype, device = layout
    a, *bs = (torch.empty_strided(*lies, dtype=dtype, device="meta") for lies in (of_a, *of_bs))
    experts, k, _ = bs[0].shape
    tiles = tiles_for(gated=gated, tensor_memory=has_tensor_memory(device))
    config = choose_grouped(a.shape[0], experts, [b.shape[2] for b in bs], k, sms, tiles)
    return GroupedMatmul(a, bs, replace(config, gated=gated), sms)


def sum_by_index(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[count, N]: sums in float32 of rows [R, N] by index [R], in their order. Those of other indices are left out."""
    sums = values.new_zeros(count + 1, values.shape[1], dtype=torch.float32)
    place = torch.where((index >= 0) & (index < count), index, count).long()
    if values.device.type == "cpu":
        sums.index_add_(0, place, values.float())
    else:  # which sorts, where index_add_ would add in any order
        sums.index_put_((place,), values.float(), accumulate=True)
    return sums[:count].to(values.dtype)


class GroupedMatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, A: Tensor, B: Tensor, offs: Tensor, rows: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        wants_a, wants_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(A if wants_b else None, B if wants_a else None, offs, rows)
        ctx.tokens, ctx.transposed = A.shape[0], B.stride(1) == 1
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = _ops.grouped_matmul(A, B, offs, rows, bias)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient("grouped_matmul")
        A, B, offs, rows = ctx.saved_tensors
        wants_a, wants_b, _, _, wants_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        of_a = of_b = of_bias = None
        if wants_a:
            of_rows = _ops.grouped_matmul(grad, B.mT, offs, None, None)
            here = torch.arange(grad.shape[0], device=grad.device) < ends_within(offs, grad.shape[0])[-1]
            if rows is None:
                of_a = torch.where(here[:, None], of_rows, 0)
            else:
                of_a = _ops.sum_by_index(of_rows, torch.where(here, rows, -1), ctx.tokens)
        if wants_b:
            of_b = _ops.grouped_matmul_gradient_of_b(A, grad, offs, rows, ctx.transposed)
        if wants_bias:
            of_bias = _ops.sum_by_index(grad, experts_of_rows(offs, grad.shape[0]), offs.shape[0])
        return of_a, of_b, None, None, of_bias


def _with_gradient(
    A: Tensor, B: Tensor, offs: Tensor, rows: Tensor | None, bias: Tensor | None, swiglu: bool = False
) -> Tensor:
    validate_grouped(A, B, offs, rows, bias, swiglu)  # the product alone takes more
    return activated(GroupedMatmulFunction.apply(A, B, offs, rows, bias), swiglu=swiglu)


def _gradient_of_b(A: Tensor, grad: Tensor, offs: Tensor, rows: Tensor | None, transposed: bool) -> Tensor:
    """[E, K, N], of each expert's rows. It lies as B does. Whatever offs and rows hold, nothing else is read."""
    taken = A.contiguous() if rows is None else A[rows.long().clamp(0, A.shape[0] - 1)]
    offs = ends_within(offs, grad.shape[0])
    if transposed:
        return torch._grouped_mm(grad.t(), taken, offs).mT
    return torch._grouped_mm(taken.t(), grad, offs)


def _fake_of_b(A: Tensor, grad: Tensor, offs: Tensor, rows: Tensor | None, transposed: bool) -> Tensor:
    experts, k, n = offs.shape[0], A.shape[1], grad.shape[1]
    return A.new_empty(experts, n, k).mT if transposed else A.new_empty(experts, k, n)


define(
    "grouped_matmul(Tensor A, Tensor B, Tensor offs, Tensor? rows, Tensor? bias, bool swiglu=False) -> Tensor",
    validate_grouped,
    lambda A, B, offs, rows, bias, swiglu=False: multiply(A, [(B, bias)], offs, rows, swiglu=swiglu)[0],
    lambda A, B, offs, rows, bias, swiglu=False: A.new_empty(
        (A if rows is None else rows).shape[0], B.shape[2] // (1 + swiglu)
    ),
    _with_gradient,
)
define(
    "grouped_matmul_gradient_of_b(Tensor A, Tensor grad, Tensor offs, Tensor? rows, bool transposed) -> Tensor",
    lambda *_: None,
    _gradient_of_b,
    _fake_of_b,
)
define(
    "sum_by_index(Tensor values, Tensor index, int count) -> Tensor",
    lambda *_: None,
    sum_by_index,
    lambda values, index, count: values.new_empty(count, values.shape[1]),
)
