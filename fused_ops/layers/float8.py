"""Differentiable products in fp8 of operands of 16 or 32 bits, quantised on the way: forward e4m3, gradients e5m2.

A product of given fp8 operands has no gradient: numbers in fp8 are what a cast has made, and whoever has cast them
knows what to do with one. Here the cast is part of the function, as in torchao's Float8Linear with dynamic tensor-wise
scales, whose numbers these are: the scale of an operand is that of the whole, from the maximum of all ranks' parts. So
what travels is fp8, in the backward, too; and what is kept for it has a byte a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d

from ...kernels.device.capability import runs_on
from ...kernels.device.gemm.scaling import ScaleKind, Scales, torch_product
from ...kernels.float8_cast.reference import MOST, Float8, reference_cast, reference_maxima
from ...symm_mem import Group, group_name, resolve_group
from ...symm_mem.backends import cuda_state
from .. import validation
from ..collectives import one_shot_all_gather, one_shot_reduce_scatter
from ..dispatch.plan import on
from ..dispatch.tensor_guards import needs_no_dispatch
from ..functional import ReduceOp, one_shot_all_reduce
from ..library.implement import refuse_transform
from ..ops.gradients import flat_rows
from ..scaled import fused_all_gather_scaled_matmul, fused_scaled_matmul_reduce_scatter

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SIZES = 16  # what K, N, and the rows of a weight's gradient must be multiples of


def float8_all_gather_matmul(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, group: Group = None, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """``A = all_gather(A_shard, gather_dim)`` and ``A @ B`` for each B in fp8: a column-parallel layer, with gradients.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import float8_all_gather_matmul
    >>> x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    >>> _, (y,) = float8_all_gather_matmul(x, [weight.t()], 0, return_A=False)
    >>> y.sum().backward()
    >>> y.shape == (16 * dist.get_world_size(), 48), x.grad.shape, weight.grad.shape
    (True, torch.Size([16, 32]), torch.Size([48, 32]))

    A_shard and each B are cast to float8_e4m3fn, with a scale for each, of the maximum over all ranks. The gradient of
    a product is cast to float8_e5m2 likewise; that of A_shard is a ``fused_scaled_matmul_reduce_scatter`` for each B,
    and with ``return_A`` a reduce-scatter of A's. Differentiable once. Works under torch.compile. Every rank must call
    it, and its backward, with the same shapes.

    Args:
        A_shard: [..., K], 2 or more dimensions; float32, bfloat16 or float16; any strides. K is a multiple of 16.
        Bs: matrices [K, N_i] of this rank, of A_shard's dtype; N_i is a multiple of 16. Where one requires a gradient,
            the gathered A must have a multiple of 16 rows.
        gather_dim: the dimension along which the shards are joined, in rank order; may be negative; not the last.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        return_A: whether the gathered A is wanted, too. It costs a reduce-scatter in the backward.

    Returns:
        A (None without ``return_A``), as the cast left it, and the products [..., N_i]: of A_shard's dtype, contiguous
        once ``gather_dim`` is moved to the front.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        PeerTimeout: a rank did not come.
    """
    validation.tensor("A_shard", A_shard, 2)
    validation.flags(return_A=return_A)
    matrices = {f"Bs[{i}]": B for i, B in enumerate(validation.tensors("Bs", Bs))}
    if not matrices:
        raise ValueError("Bs: is empty, must have one matrix or more")
    dim, name = _checked(("A_shard", A_shard), matrices, ("gather_dim", gather_dim), group)
    rows = A_shard.numel() // max(A_shard.shape[-1], 1) * _size_of(name)
    _check_rows("A_shard", matrices, rows)
    Bs = [*matrices.values()]
    results: tuple[Tensor, ...] = _apply(_AllGatherFloat8, [A_shard, *Bs], A_shard, dim, name, return_A, *Bs)
    A, outs = (results[0], results[1:]) if return_A else (None, results)
    return A, [*outs]


def float8_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: ReduceOp, scatter_dim: int, group: Group = None
) -> Tensor:
    """``reduce_scatter(A @ B, reduce_op, scatter_dim)`` in fp8: a row-parallel layer, with its gradients.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import float8_matmul_reduce_scatter
    >>> W = dist.get_world_size()
    >>> x, weight = torch.randn(16 * W, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    >>> y = float8_matmul_reduce_scatter(x, weight.t(), "sum", 0)
    >>> y.sum().backward()
    >>> y.shape, x.grad.shape == x.shape, weight.grad.shape
    (torch.Size([16, 48]), True, torch.Size([48, 32]))

    As ``float8_all_gather_matmul``; the gradient of the result is cast, then gathered in fp8 by a
    ``fused_all_gather_scaled_matmul``.

    Args:
        A: [..., K], 2 or more dimensions; float32, bfloat16 or float16; any strides. K is a multiple of 16.
        B: [K, N], of A's dtype; N is a multiple of 16. Where it requires a gradient, A must have a multiple of 16 rows.
        reduce_op: "sum", or "avg" for the sum divided by the number of ranks; also as a torch.distributed.ReduceOp.
        scatter_dim: the dimension of the product that is cut into one part a rank; may be negative; not the last. Its
            size must be a multiple of the number of ranks.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        the local part, of A's dtype, contiguous.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        PeerTimeout: a rank did not come.
    """
    validation.tensor("A", A, 2)
    validation.tensor("B", B)
    reduce_op = validation.reduction(reduce_op)
    dim, name = _checked(("A", A), {"B": B}, ("scatter_dim", scatter_dim), group)
    size = _size_of(name)
    if A.shape[dim] % size:
        raise ValueError(
            f"scatter_dim: A @ B has size {A.shape[dim]} there, must be a multiple of {size} ranks"
        )
    _check_rows("A", {"B": B}, A.numel() // max(A.shape[-1], 1))
    result: Tensor = _apply(_Float8ReduceScatter, [A, B], A, B, reduce_op, dim, name)
    return result


def _apply(function: type[torch.autograd.Function], tensors: Sequence[Tensor], *args: Any) -> Any:
    """Without autograd where no gradient is wanted: that takes the host as long as a launch."""
    if torch.compiler.is_compiling() or not needs_no_dispatch(*tensors):
        return function.apply(*args)
    ctx = SimpleNamespace(needs_input_grad=[False] * len(args))
    ctx.save_for_backward = ctx.mark_non_differentiable = lambda *_: None
    return function.forward(ctx, *args)


class _AllGatherFloat8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, A_shard: Tensor, dim: int, group: str, return_A: bool, *Bs: Tensor
    ) -> tuple[Tensor, ...]:
        of_A, _, _, _, *of_Bs = ctx.needs_input_grad
        a, *bs = _cast_together([A_shard, *[B.t() for B in Bs]], _E4M3, group, [False, *[of_A] * len(Bs)])
        args = a.numbers, [b.numbers.t() for b in bs], a.scale, [b.scale for b in bs], dim, group
        each: Any = {"out_dtypes": [A_shard.dtype] * len(bs), "use_fast_accum": [True] * len(bs)}
        A, outs = fused_all_gather_scaled_matmul(*args, **each, return_A=return_A or any(of_Bs))
        kept = [b.transposed for b in bs]
        ctx.save_for_backward(A if any(of_Bs) else None, a.scale, *kept, *[b.scale for b in bs])
        ctx.dim, ctx.group, ctx.return_A = dim, group, return_A
        constants = [out for out, of_B in zip(outs, of_Bs, strict=True) if not (of_A or of_B)]
        results = tuple(outs)
        if return_A:
            assert A is not None
            gathered = (A.float() * a.scale).to(A_shard.dtype)
            constants += [] if of_A else [gathered]
            results = gathered, *outs
        if constants:
            ctx.mark_non_differentiable(*constants)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Zeros, too, of results that nobody used: Dynamo materializes them, and all ranks make the same calls.
        of_A, _, _, _, *of_Bs = ctx.needs_input_grad
        A, a_scale, *saved = ctx.saved_tensors
        weights, scales = saved[: len(of_Bs)], saved[len(of_Bs) :]
        of_products = grads[1:] if ctx.return_A else grads
        grad_shard: Tensor | None = None
        if of_A and ctx.return_A:
            grad_shard = one_shot_reduce_scatter(grads[0], "sum", ctx.dim, ctx.group)
        wanted = [i for i, of_B in enumerate(of_Bs) if of_A or of_B]
        grad_Bs: list[Tensor | None] = [None] * len(of_Bs)
        cast = _cast_together([of_products[i] for i in wanted], _E5M2, ctx.group, [of_Bs[i] for i in wanted])
        columns = _transposed(A) if any(of_Bs) else None
        for i, g in zip(wanted, cast, strict=True):
            dtype = of_products[i].dtype
            if of_A:
                args = g.numbers, weights[i].t(), g.scale, scales[i], "sum", ctx.dim, ctx.group
                part = fused_scaled_matmul_reduce_scatter(*args, out_dtype=dtype)
                grad_shard = part if grad_shard is None else grad_shard + part
            if of_Bs[i]:
                grad_Bs[i] = _gradient_of_weight(g.transposed, g.scale, columns, a_scale, dtype)
        return grad_shard, None, None, None, *grad_Bs


class _Float8ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, reduce_op: str, dim: int, group: str) -> Tensor:
        of_A, of_B = ctx.needs_input_grad[:2]
        a, b = _cast_together([A, B.t()], _E4M3, group, [of_B, of_A])
        ctx.save_for_backward(a.transposed, a.scale, b.transposed, b.scale)
        ctx.dim, ctx.group = dim, group
        ctx.parts = _size_of(group) if reduce_op == "avg" else 1
        args = a.numbers, b.numbers.t(), a.scale, b.scale, reduce_op, dim, group
        return fused_scaled_matmul_reduce_scatter(*args, out_dtype=A.dtype, use_fast_accum=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        A, a_scale, weight, b_scale = ctx.saved_tensors
        (g,) = _cast_together([grad], _E5M2, ctx.group, [False])
        scale = g.scale / ctx.parts if ctx.parts > 1 else g.scale
        grad_A = grad_B = gathered = None
        if weight is not None:
            args = g.numbers, [weight.t()], scale, [b_scale], ctx.dim, ctx.group
            gathered, (grad_A,) = fused_all_gather_scaled_matmul(
                *args, out_dtypes=[grad.dtype], return_A=A is not None
            )
        if A is not None:
            if gathered is None:
                gathered = one_shot_all_gather(g.numbers, ctx.dim, ctx.group)
            grad_B = _gradient_of_weight(_transposed(gathered), scale, A, a_scale, grad.dtype)
        return grad_A, grad_B, None, None, None


def _cast_together(
    tensors: Sequence[Tensor], dtype: torch.dtype, group: str, transposed: Sequence[bool]
) -> list[Float8]:
    """Each with a scale of its own, by the maximum over all ranks."""
    if torch.compiler.is_compiling() or not _has_kernel(tensors):
        maxima = one_shot_all_reduce(reference_maxima(tensors), "max", group)
        return reference_cast(tensors, maxima, dtype, transposed)
    from ...kernels.float8_cast.cuda_kernel import Float8Cast

    with on(tensors[0].device):
        cast = Float8Cast(tensors, dtype, transposed)
        return cast.numbers(one_shot_all_reduce(cast.maxima(), "max", group))


def _has_kernel(tensors: Sequence[Tensor]) -> bool:
    """It computes the same bits as torch's operators: ranks need not agree."""
    on_cuda = cuda_state.state.index_of(tensors[0]) >= 0 and len(tensors) <= MOST
    return on_cuda and needs_no_dispatch(*tensors) and _runs_on(tensors[0].device)


@cache
def _runs_on(device: torch.device) -> bool:
    return runs_on("float8_cast/kernel.cu", device)


def _transposed(x: Tensor) -> Tensor:
    return flat_rows(x).t().contiguous()


def _gradient_of_weight(
    grad: Tensor | None, scale: Tensor, A: Tensor | None, A_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """``A^T @ grad`` of all rows, of both transposed and their scales. It lies as the transposed of a weight."""
    assert grad is not None and A is not None
    scales = Scales(ScaleKind.TENSOR, scale.view(1, 1), A_scale.view(1, 1))
    return torch_product(grad, A.t(), scales, None, dtype, fast=False).t()


def _checked(
    named: tuple[str, Tensor], matrices: Mapping[str, Tensor], dim: tuple[str, int], group: Group
) -> tuple[int, str]:
    """The dimension, not negative, and the group's name."""
    refuse_transform("a product in fp8")
    (name, A), (dim_name, given) = named, dim
    validation.float_dtype(name, A)
    for of_B, B in matrices.items():
        validation.validate_matrix(of_B, B, A.shape[-1], A, name)
        for what, size in (("rows", B.shape[0]), ("columns", B.shape[1])):
            if size % _SIZES:
                raise ValueError(f"{of_B}: has {size} {what}, must have a multiple of {_SIZES}")
    validation.dimension(dim_name, given, name, A.dim())
    if given % A.dim() == A.dim() - 1:
        raise ValueError(f"{dim_name}: is {given}, the last dimension, must be another one")
    return given % A.dim(), group_name(group)


def _size_of(group: str) -> int:
    # Dynamo of torch 2.11 looks up no group by its name, but knows this function.
    if torch.compiler.is_compiling():
        return distributed_c10d._get_group_size_by_name(group)  # type: ignore[arg-type]
    return resolve_group(group).size()


def _check_rows(name: str, matrices: Mapping[str, Tensor], rows: int) -> None:
    for of_B, B in matrices.items() if rows % _SIZES else ():
        if torch.is_grad_enabled() and B.requires_grad:
            raise ValueError(
                f"{name}: makes {rows} rows in all, must make a multiple of {_SIZES} where {of_B} requires a gradient"
            )
