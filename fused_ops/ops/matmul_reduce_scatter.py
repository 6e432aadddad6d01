"""fused_matmul_reduce_scatter: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.matmul_reduce_scatter import OP
from ...kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.choice import Choice, Known, choose_kernel, host_or, launch_kernel
from ..dispatch.plan import num_sms, preferred_between
from ..dispatch.staging import Staging, aligned, in_rows_or_columns
from . import gradients
from .op import Op
from .reduce_scatter import ReduceScatterCall, run_reduce_scatter

_WHOLE_TILES = 128  # rows: every tile's height divides it, so that no tile is cut off
_ops = torch.ops.weft


class MatmulReduceScatterCall(NamedTuple):
    A: Tensor
    B: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    out_dtype: torch.dtype | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    more: Sequence[Tensor] | None = None
    group_size: int | None = None

    @property
    def factors(self) -> list[Tensor]:
        """A and B, and those of the further products that are added."""
        return [self.A, self.B, *(self.more or ())]

    @property
    def stacked(self) -> MatmulReduceScatterCall:
        """The same of one product, of the factors side by side."""
        if not self.more:
            return self
        As, Bs = self.factors[::2], self.factors[1::2]
        return self._replace(A=torch.cat(As, -1), B=torch.cat(Bs), more=None)

    @property
    def terms(self) -> list[Tensor]:
        """What is added to the local part of the sum."""
        return [term for term in (self.bias, self.residual) if term is not None]

    def local_shape(self, world_size: int) -> list[int]:
        """That of the local part; ``scatter_dim`` is not negative."""
        shape = [*self.A.shape[:-1], self.B.shape[1]]
        shape[self.scatter_dim] = shape[self.scatter_dim] // world_size
        return shape


def _validate(call: MatmulReduceScatterCall) -> tuple[MatmulReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative and the dtype of its result, and the group."""
    group, A, B = resolve_group(call.group_name), call.A, call.B
    validation.left_operand("A", A)
    validation.validate_matrix("B", B, A.shape[-1], A, "A")
    _further_factors(call.more or (), A, B)
    validation.reduction(call.reduce_op)
    if call.out_dtype not in (None, A.dtype, torch.float32):
        raise TypeError(f"out_dtype: is {call.out_dtype}, must be {A.dtype} like A, or float32")
    dim = validation.checked_dim("scatter_dim", call.scatter_dim, "A", A.dim())
    size = B.shape[1] if dim == A.dim() - 1 else A.shape[dim]
    if size % group.size():
        raise ValueError(
            f"scatter_dim: A @ B has size {size} there, must be a multiple of {group.size()} ranks"
        )
    call = call._replace(scatter_dim=dim, out_dtype=call.out_dtype or A.dtype)
    shape = call.local_shape(group.size())
    for name, term, of_term in (("bias", call.bias, shape[-1:]), ("residual", call.residual, shape)):
        if term is not None:
            validation.must_have_shape(name, term, of_term, " to go with the result")
            validation.like_tensor(name, term, A, "A")
    return call, group


def _further_factors(more: Sequence[Tensor], A: Tensor, B: Tensor) -> None:
    if len(more) % 2:
        raise ValueError(f"more: has {len(more)} tensors, must have an A and a B of each further product")
    for i in range(0, len(more), 2):
        a, b = more[i], more[i + 1]
        if a.shape[:-1] != A.shape[:-1]:
            raise ValueError(
                f"more[{i}]: has shape {tuple(a.shape)}, must have that of A, {tuple(A.shape)}, but for its last size"
            )
        validation.like_tensor(f"more[{i}]", a, A, "A")
        validation.validate_matrix(f"more[{i + 1}]", b, a.shape[-1], A, f"more[{i}]")
        if b.shape[1] != B.shape[1]:
            raise ValueError(f"more[{i + 1}]: has {b.shape[1]} columns, must have {B.shape[1]} like B")


def _known_by(call: MatmulReduceScatterCall) -> Known:
    if call.out_dtype not in (None, call.A.dtype):
        return None
    how: tuple[int | str, ...] = call.scatter_dim, call.reduce_op
    terms, more = call.terms, call.more
    if terms or more:
        how = *how, call.bias is not None, call.residual is not None, len(more or ())
    return how, (call.A, call.B, *(more or ()), *terms)


def _run(choice: Choice, where: Heap, call: MatmulReduceScatterCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    if choice.algorithm not in ("host", "unfused"):
        return _on_cuda(choice, where, call)
    if choice.algorithm == "host":
        choice.begin_on(where, OP)
    call = call.stacked
    # Between CPU ranks as the kernels, which round once; else what is summed has the dtype of the result.
    dtype = torch.float32 if choice.algorithm == "host" else call.A.dtype
    product = call.A.to(dtype) @ call.B.to(dtype)
    if choice.is_unfused:
        product = product.to(call.out_dtype)
    scatter = ReduceScatterCall(product, call.reduce_op, call.scatter_dim, call.group_name)
    own = run_reduce_scatter(choice, where, scatter, group, op=OP)
    if len(call.terms) > 1:
        own = own.to(torch.promote_types(own.dtype, torch.float32))
    for term in call.terms:
        own = own + term
    return own.to(call.out_dtype)


def _parts(A: Tensor, dim: int, size: int) -> Tensor:
    """A as [L, W, m, K]: rows of part w, for each index before the scattered dimension.

    Where nothing is before it, L may be what is after it, but for the last rows: they are then all that must lie
    evenly. Asked of the shape, never of the strides: L and m must be the same on all ranks.

    Raises:
        RuntimeError: A does not lie so that this is a view of it.
    """
    lead, k, m = prod(A.shape[:dim]), A.shape[-1], A.shape[-2]
    whole = A.dtype.itemsize == 2 and m and m % _WHOLE_TILES == 0  # around cuBLAS there are no tiles
    if lead == 1 and dim < A.dim() - 2 and whole:
        return A.view(size, A.shape[:-2].numel() // size, m, k).transpose(0, 1)
    return A.view(lead, size, A.shape[:-1].numel() // (lead * size), k)


def _choose_on_cuda(call: MatmulReduceScatterCall, group: ProcessGroup) -> Choice:
    from ...kernels.matmul_reduce_scatter import on_cuda

    A, B, dim, size = call.A, call.B, call.scatter_dim, group.size()
    split_n = dim == A.dim() - 1
    staging = Staging()

    def taken(name: str, factor: Tensor, is_B: int) -> Tensor:
        if is_B:
            return staging.take(name, factor, fits=in_rows_or_columns)
        if split_n:
            return staging.take(name, factor, lambda x: x.view(1, 1, x.shape[:-1].numel(), x.shape[-1]))
        return staging.take(name, factor, lambda x: _parts(x, dim, size))

    parts, b = taken("A", A, 0), taken("B", B, 1)
    more = [taken(f"more[{i}]", factor, i % 2) for i, factor in enumerate(call.more or ())]
    preferred = preferred_between(
        group, B.device, (size - 1) * prod(call.local_shape(size)) * A.element_size()
    )
    terms = call.bias is not None, call.residual is not None
    epilogue = Epilogue(call.out_dtype or A.dtype, call.reduce_op == "avg", *terms)
    used = ScatterKernelCall(parts, b, num_sms(B.device), epilogue, call.terms, split_n, more, preferred)
    if not on_cuda.adds_products(used, size):
        return _choose_on_cuda(call.stacked, group)
    too_little = "too little is multiplied and scattered"
    return choose_kernel(on_cuda.SCATTER_STEPS, used, staging, group, too_little, call)


def _on_cuda(choice: Choice, where: Heap, given: MatmulReduceScatterCall) -> Tensor:
    call, shape = choice.how.given, given.local_shape(where.world_size)
    if given.more and not call.more:  # the kernel does not add products: these are one, of copies
        choice = replace(choice, known=None)

    def with_terms(used: ScatterKernelCall) -> ScatterKernelCall:
        return replace(used, terms=[aligned(term.contiguous()) for term in call.terms])

    (out,) = launch_kernel(choice, where, OP, lambda made: [made[0].view(shape)], with_terms)
    return out


class MatmulReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MatmulReduceScatterCall, bias: Any, residual: Any, *factors: Tensor) -> Any:
        ctx.reduce_op, ctx.scatter_dim, ctx.dtype = call.reduce_op, call.scatter_dim, call.A.dtype
        ctx.group_name, ctx.group_size = call.group_name, call.group_size
        done = MATMUL_REDUCE_SCATTER.run_below_autograd(call)
        ctx.has_own_bias = call.scatter_dim % call.A.dim() == call.A.dim() - 1
        _, _, _, *of_factors = ctx.needs_input_grad
        # Each for the gradient of the other one of its product.
        ctx.save_for_backward(*(x if of_factors[i ^ 1] else None for i, x in enumerate(factors)))
        ctx.transposed = [gradients.is_transposed_matrix(B) for B in factors[1::2]]
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors  # a checkpoint unpacks them once
        As, Bs = saved[::2], saved[1::2]
        _, needs_bias, needs_residual, *needed = ctx.needs_input_grad
        of_As, of_Bs = needed[::2], needed[1::2]
        size = resolve_group(ctx.group_name).size()
        grad_bias = None
        if needs_bias:
            grad_bias = gradients.flat_rows(grad).sum(0, dtype=torch.float32)
            # Each rank has added it to its part of the rows only; of the last dimension to its columns, all rows.
            if not ctx.has_own_bias:
                grad_bias = gradients.SumOverRanks.apply(grad_bias, ctx.group_name, ctx.group_size)
            grad_bias = grad_bias.to(ctx.dtype)
        grad_residual = grad.to(ctx.dtype) if needs_residual else None
        grads: list[Tensor | None] = [None] * len(needed)
        if any(needed):
            if ctx.reduce_op == "avg":
                grad = grad / size
            grad = grad.to(ctx.dtype)
            if any(of_As):
                named = {"return_A": any(of_Bs), "group_size": ctx.group_size}
                others = [B.t() for B, of_A in zip(Bs, of_As, strict=True) if of_A]
                args = (grad, others, ctx.scatter_dim, ctx.group_name)
                gathered, outs = _ops.fused_all_gather_matmul(*args, **named)
                made = iter(outs)
                grads[::2] = [next(made) if of_A else None for of_A in of_As]
            else:
                gathered = gradients.all_gather(grad, ctx.scatter_dim, size, ctx.group_name)
            grads[1::2] = [
                gradients.gradient_of_matrix(A, gathered, transposed) if of_B else None
                for A, transposed, of_B in zip(As, ctx.transposed, of_Bs, strict=True)
            ]
        return None, grad_bias, grad_residual, *grads


def matmul_flops(
    A: Sequence[int], B: Sequence[int], *_: Any, more: Sequence[Sequence[int]] | None = None, **__: Any
) -> int:
    return 2 * B[1] * (prod(A) + sum(prod(a) for a in (more or ())[::2]))


MATMUL_REDUCE_SCATTER = Op(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, *,"
    " ScalarType? out_dtype=None, Tensor? bias=None, Tensor? residual=None, Tensor[]? more=None,"
    " int? group_size=None) -> Tensor",
    record=MatmulReduceScatterCall,
    validate=_validate,
    fake=lambda call, group: call.A.new_empty(call.local_shape(group.size()), dtype=call.out_dtype),
    kernel="matmul_reduce_scatter",
    sends_nothing=lambda call, group: 0 in call.local_shape(group.size()),
    choose=host_or(lambda call, group: 4 * prod(call.local_shape(group.size())), _choose_on_cuda),
    run=_run,
    known_by=_known_by,
    with_gradient=lambda call: MatmulReduceScatterFunction.apply(
        call, call.bias, call.residual, *call.factors
    ),
    flops=matmul_flops,
    own_dims={"A": (-1,), "B": (0,), "more": (-1, 0)},
)
