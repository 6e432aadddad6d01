"""fused_grouped_matmul_all_reduce and fused_grouped_matmul_reduce_scatter: experts' second product, and what its rows
add up to over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined
from ....kernels.grouped_matmul.reference import experts_of_rows
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice
from ..gradients import refuse_second_gradient
from ..op import Op, on_device
from .combine import choose_combined, how_reduced, reduce_combined, validate_combined
from .grouped_matmul import multiply, validate_grouped

ALL_REDUCE_OP = "fused_grouped_matmul_all_reduce"
_ops = torch.ops.weft


def _combined(call: Any, y: Tensor | None = None) -> Combined:
    """With the product y, or before there is one: with a tensor of its shape, device and dtype, without memory of its
    own."""
    if y is None:
        y = call.A.as_strided((call.A.shape[0], call.B.shape[2]), (0, 0))
    return Combined(y, call.slots, call.weights, call.shared)


def _validate(call: Any) -> tuple[Any, ProcessGroup]:
    """The call with a dimension that is not negative, if it has one, and the group."""
    group = resolve_group(call.group_name)
    validate_grouped(call.A, call.B, call.offs, None, call.bias)
    validation.reduction(call.reduce_op)
    validate_combined(combined := _combined(call), "A")
    call = how_reduced(call).checked(call, combined, group)
    if (residual := call.residual) is not None:
        shape = how_reduced(call).result_shape(combined, group.size())
        validation.must_have_shape("residual", residual, shape, " like the result")
        validation.like_tensor("residual", residual, call.A, "A")
    return call, group


def _run(op: str, choice: Choice, where: Heap | None, call: Any, group: ProcessGroup) -> Tensor:
    with on_device(call.A):
        (y,) = multiply(call.A, [(call.B, call.bias)], call.offs, None)
        combined = _combined(call, y)
    out = reduce_combined(choice, where, combined, how_reduced(call), group, op)
    return out if call.residual is None else out + call.residual


class SavedProduct(NamedTuple):
    """What the gradients of ``sum over k of weights[t, k] * y[slots[t, k]]`` are made of, y of A, B and a bias."""

    A: Tensor
    B: Tensor
    offs: Tensor
    slots: Tensor
    weights: Tensor
    bias: Tensor | None

    def without_unneeded(self, of_b: bool, of_weights: bool) -> SavedProduct:
        """Without the values of A where no gradient needs them: it may be changed, and its memory freed."""
        A = self.A
        return self if of_b or of_weights else self._replace(A=A.new_empty(()).expand(A.shape))

    def gradients(self, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Those of A, B, weights and bias that are wanted, of the sum's gradient [T, N].

        Each row is of one choice at most. So no product is made again: a weight's gradient is that of its unweighted
        row, multiplied with the row of A.
        """
        of_a, of_b, of_weights, of_bias = wanted
        A, B, offs, slots, weights, bias = self
        rows, choices = A.shape[0], slots.shape[1]
        lies = torch.where((slots >= 0) & (slots < rows), slots, rows).long()
        chosen = lies.new_full((rows + 1,), slots.numel())
        chosen.scatter_(0, lies.flatten(), torch.arange(slots.numel(), device=slots.device))
        chosen = chosen[:rows]  # the choice of each row; past the last one, of none
        of_rows = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])[chosen // choices]
        factors = torch.cat([weights.flatten(), weights.new_zeros(1)])[chosen].float()[:, None]
        found: list[Tensor | None] = [None] * 4
        if of_a or of_weights:
            unweighted = _ops.grouped_matmul(of_rows, B.mT, offs, None, None)
            here = (torch.arange(rows, device=A.device) < offs[-1])[:, None]
            unweighted = torch.where(here, unweighted, 0).float()
            if of_a:
                found[0] = (unweighted * factors).to(A.dtype)
            if of_weights:
                dots = torch.where(here, unweighted * A, 0).sum(1)
                if bias is not None:
                    added = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[experts_of_rows(offs, rows)]
                    dots = dots + (added.float() * of_rows).sum(1)
                found[2] = torch.cat([dots, dots.new_zeros(1)])[lies].to(weights.dtype)
        if of_b or of_bias:
            weighted = (of_rows * factors).to(A.dtype)
            if of_b:
                transposed = B.stride(1) == 1
                found[1] = _ops.grouped_matmul_gradient_of_b(A, weighted, offs, None, transposed)
            if of_bias:
                found[3] = _ops.sum_by_index(weighted, experts_of_rows(offs, rows), offs.shape[0])
        return found


class GroupedMatmulSumFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, call: Any, *tensors: Tensor | None) -> Any:
        ctx.op, ctx.reduction = op.name, how_reduced(call)
        _, of_b, of_weights, *_ = ctx.needs_input_grad[2:]
        product = SavedProduct(call.A, call.B, call.offs, call.slots, call.weights, call.bias)
        ctx.save_for_backward(*product.without_unneeded(of_b, of_weights))
        return op.run_below_autograd(call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(ctx.op)
        *wanted, of_residual, of_shared = ctx.needs_input_grad[2:]
        found: list[Tensor | None] = [None] * 4
        whole = None
        if any(wanted) or of_shared:
            whole = ctx.reduction.gradient(grad)
            found = SavedProduct(*ctx.saved_tensors).gradients(whole, wanted)
        return None, None, *found, grad if of_residual else None, whole if of_shared else None


_OPERANDS = "Tensor A, Tensor B, Tensor offs, Tensor slots, Tensor weights, str reduce_op"
_TERMS = "Tensor? bias=None, Tensor? residual=None, Tensor? shared=None, int? group_size=None"


def _op(name: str, group: str, kernel: str) -> Op:
    op: Op = Op(
        f"{name}({_OPERANDS}, {group}, *, {_TERMS}) -> Tensor",
        validate=_validate,
        fake=lambda call, group: call.A.new_empty(
            how_reduced(call).result_shape(_combined(call), group.size())
        ),
        kernel=kernel,
        sends_nothing=lambda call, group: call.slots.shape[0] * call.B.shape[2] == 0,
        choose=lambda call, group: choose_combined(_combined(call), how_reduced(call), group),
        run=partial(_run, name),
        with_gradient=lambda call: GroupedMatmulSumFunction.apply(
            op, call, call.A, call.B, call.weights, call.bias, call.residual, call.shared
        ),
        flops=lambda A, B, *_, **__: 2 * A[0] * A[1] * B[2],
        own_dims={"A": (1,), "B": (0, 1), "offs": (0,), "bias": (0,)},
        own_on_cuda=True,
    )
    return op


GROUPED_MATMUL_ALL_REDUCE = _op(ALL_REDUCE_OP, "str group_name", "all_reduce")
_SCATTERED = "int scatter_dim, str group_name"
GROUPED_MATMUL_REDUCE_SCATTER = _op("fused_grouped_matmul_reduce_scatter", _SCATTERED, "reduce_scatter")
