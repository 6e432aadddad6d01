"""Gradients. The all-gather before a product and the reduce-scatter after one are each other's backward.

Tensors are direct arguments of each function: of those in a record autograd sees nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from ...symm_mem import resolve_group
from ..ops.calls import (
    AllGatherCall,
    AllGatherMatmulCall,
    AllReduceCall,
    AllReduceLayerNormCall,
    AllReduceRmsNormCall,
    MatmulAllReduceCall,
    MatmulReduceScatterCall,
    ReduceScatterCall,
)
from . import implementations, validation

_ops, _collectives = torch.ops.weft, torch.ops._c10d_functional

AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """As the ops, which cast nothing where autocast is on."""
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return x @ y


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2)


def _is_transposed(B: Tensor) -> bool:
    """Of what an op has taken for a matrix: it refuses other shapes."""
    return B.stride(0) == 1 and B.stride(1) == B.shape[0]


def _gradient(A: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    """That of B in ``A @ B``. It lies as B does, a weight's as the weight: else torch copies it to where it counts.

    A, grad: [..., K] and [..., N], of all rows.
    """
    x, g = _rows(A), _rows(grad)
    return _product(g.t(), x).t() if transposed else _product(x.t(), g)


def _reduce_scatter(grad: Tensor, dim: int, group_name: str) -> Tensor:
    """Functional, so that it can be traced."""
    moved, size = grad.movedim(dim, 0).contiguous(), resolve_group(group_name).size()
    part = _collectives.reduce_scatter_tensor(moved, "sum", size, group_name)
    return _collectives.wait_tensor(part).movedim(0, dim)


def all_gather(x: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """The same, of ``size`` ranks."""
    whole = _collectives.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), size, group_name)
    return _collectives.wait_tensor(whole).movedim(0, dim)


class SumGradient(torch.autograd.Function):
    """Before what every rank uses for a part of the result: each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int | None) -> Tensor:
        ctx.group = group_name, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumOverRanks.apply(grad, *ctx.group), None, None


class SumOverRanks(torch.autograd.Function):
    """Sums what the ranks hold. All of them use the sum alike: its gradient is already whole on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int | None) -> Tensor:
        ctx.group = group_name, size
        total: Tensor = _ops.one_shot_all_reduce(x, "sum", group_name, group_size=size)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumGradient.apply(grad, *ctx.group), None, None


class AllGatherMatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllGatherMatmulCall, A_shard: Tensor, *Bs: Tensor) -> Any:
        _, of_A, *of_Bs = ctx.needs_input_grad
        needs_A = any(of_Bs)
        if needs_A and not call.return_A:
            call = call._replace(return_A=True)
        A, outs = implementations.ALL_GATHER_MATMUL.run_below_autograd(call)
        ctx.set_materialize_grads(False)
        ctx.gather_dim, ctx.group_name, ctx.group_size = call.gather_dim, call.group_name, call.group_size
        # Each operand for the gradients of the others alone: else nobody keeps it, and it may be changed, as in torch.
        ctx.save_for_backward(A if needs_A else None, *(Bs if of_A else [None] * len(Bs)))
        ctx.transposed = [_is_transposed(B) for B in Bs]
        constants = [out for out, of_B in zip(outs, of_Bs, strict=True) if not (of_A or of_B)]
        ctx.mark_non_differentiable(*([] if of_A or A is None else [A]), *constants)
        # Also where the caller does not want it: to a second backward what is saved and is no result is a constant.
        return A, *outs

    @staticmethod
    def backward(ctx: Any, grad_A: Tensor | None, *grads: Tensor | None) -> Any:
        A, *Bs = ctx.saved_tensors
        _, of_A, *of_Bs = ctx.needs_input_grad
        pairs = [(g, B) for g, B in zip(grads, Bs, strict=True) if g is not None]
        grad_shard: Tensor | None = None
        if of_A:
            if pairs:
                # One op for all of them, which sums the products.
                g, B, *more = [x for g, B in pairs for x in (g, B.t())]
                args = (g, B, "sum", ctx.gather_dim, ctx.group_name)
                named = {"more": more} if more else {}
                grad_shard = _ops.fused_matmul_reduce_scatter(*args, **named, group_size=ctx.group_size)
            if grad_A is not None:
                rest = _reduce_scatter(grad_A, ctx.gather_dim, ctx.group_name)
                grad_shard = rest if grad_shard is None else grad_shard + rest
        grad_Bs = [
            _gradient(A, g, transposed) if needed and g is not None else None
            for needed, g, transposed in zip(of_Bs, grads, ctx.transposed, strict=True)
        ]
        return None, grad_shard, *grad_Bs


class MatmulReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: MatmulReduceScatterCall,
        bias: Tensor | None,
        residual: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        ctx.reduce_op, ctx.scatter_dim, ctx.dtype = call.reduce_op, call.scatter_dim, call.A.dtype
        ctx.group_name, ctx.group_size = call.group_name, call.group_size
        ctx.has_own_bias = call.scatter_dim % call.A.dim() == call.A.dim() - 1
        done: Tensor = implementations.MATMUL_REDUCE_SCATTER.run_below_autograd(call)
        _, _, _, *of_factors = ctx.needs_input_grad
        # Each for the gradient of the other one of its product.
        ctx.save_for_backward(*(x if of_factors[i ^ 1] else None for i, x in enumerate(factors)))
        ctx.transposed = [_is_transposed(B) for B in factors[1::2]]
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
            grad_bias = _rows(grad).sum(0, dtype=torch.float32)
            # Each rank has added it to its part of the rows only; of the last dimension to its columns, all rows.
            if not ctx.has_own_bias:
                grad_bias = SumOverRanks.apply(grad_bias, ctx.group_name, ctx.group_size)
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
                gathered = all_gather(grad, ctx.scatter_dim, size, ctx.group_name)
            grads[1::2] = [
                _gradient(A, gathered, transposed) if of_B else None
                for A, transposed, of_B in zip(As, ctx.transposed, of_Bs, strict=True)
            ]
        return None, grad_bias, grad_residual, *grads


class AllReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllReduceCall, x: Tensor) -> Tensor:
        ctx.reduce_op, ctx.group_name, ctx.group_size = call.reduce_op, call.group_name, call.group_size
        done: Tensor = implementations.ALL_REDUCE.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = _ops.one_shot_all_reduce(grad, ctx.reduce_op, ctx.group_name, group_size=ctx.group_size)
        return None, total


class AllGatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllGatherCall, x: Tensor) -> Tensor:
        ctx.gather_dim, ctx.group_name, ctx.group_size = call.gather_dim, call.group_name, call.group_size
        done: Tensor = implementations.ALL_GATHER.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if grad.dtype not in validation.DTYPES:
            return None, _reduce_scatter(grad, ctx.gather_dim, ctx.group_name)
        args = (grad, "sum", ctx.gather_dim, ctx.group_name)
        return None, _ops.one_shot_reduce_scatter(*args, group_size=ctx.group_size)


class ReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ReduceScatterCall, x: Tensor) -> Tensor:
        ctx.reduce_op, ctx.scatter_dim = call.reduce_op, call.scatter_dim
        ctx.group_name, ctx.group_size = call.group_name, call.group_size
        done: Tensor = implementations.REDUCE_SCATTER.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.reduce_op == "avg":
            grad = grad / resolve_group(ctx.group_name).size()
        args = (grad, ctx.scatter_dim, ctx.group_name)
        return None, _ops.one_shot_all_gather(*args, group_size=ctx.group_size)


class AllReduceRmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: AllReduceRmsNormCall, x: Tensor, residual: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.eps, ctx.group_name, ctx.group_size = call.eps, call.group_name, call.group_size
        ctx.offset, ctx.weight_dtype = call.weight_offset, weight.dtype
        normed, sums = implementations.ALL_REDUCE_RMS_NORM.run_below_autograd(call)
        ctx.save_for_backward(sums, weight if any(ctx.needs_input_grad[1:3]) else None)
        return normed, sums

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor, grad_sums: Tensor) -> Any:
        sums, weight = ctx.saved_tensors
        wide = sums.float()
        scale = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        unit, grad = wide * scale, grad_normed.float()
        grad_x = total = grad_weight = None
        if weight is not None:
            through = grad * (weight if ctx.offset == 0 else weight.float() + ctx.offset)
            inner = scale * (through - unit * (through * unit).mean(-1, keepdim=True))
            total = (inner + grad_sums).to(sums.dtype)
            if ctx.needs_input_grad[1]:
                grad_x = _ops.one_shot_all_reduce(total, "sum", ctx.group_name, group_size=ctx.group_size)
        if ctx.needs_input_grad[3]:
            grad_weight = (grad * unit).sum_to_size(sums.shape[-1:]).to(ctx.weight_dtype)
        return None, grad_x, total if ctx.needs_input_grad[2] else None, grad_weight


class AllReduceLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllReduceLayerNormCall, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.eps, ctx.group_name, ctx.group_size = call.eps, call.group_name, call.group_size
        ctx.offset, ctx.dtypes = call.weight_offset, [None if t is None else t.dtype for t in call.affine]
        normed, sums = implementations.ALL_REDUCE_LAYER_NORM.run_below_autograd(call)
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
                grad_x = _ops.one_shot_all_reduce(total, "sum", ctx.group_name, group_size=ctx.group_size)
        if of_weight:
            grad_weight = (grad * unit).sum_to_size(sums.shape[-1:]).to(ctx.dtypes[0])
        if of_bias:
            grad_bias = grad.sum_to_size(sums.shape[-1:]).to(ctx.dtypes[1])
        return None, grad_x, total if of_residual else None, grad_weight, grad_bias


class MatmulAllReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MatmulAllReduceCall, A: Tensor, B: Tensor) -> Tensor:
        _, of_A, of_B = ctx.needs_input_grad
        ctx.save_for_backward(A if of_B else None, B if of_A else None)
        ctx.reduce_op, ctx.group_name, ctx.group_size = call.reduce_op, call.group_name, call.group_size
        done: Tensor = implementations.MATMUL_ALL_REDUCE.run_below_autograd(call)
        ctx.transposed = _is_transposed(B)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        A, B = ctx.saved_tensors
        total = _ops.one_shot_all_reduce(grad, ctx.reduce_op, ctx.group_name, group_size=ctx.group_size)
        grad_A = _product(total, B.t()) if ctx.needs_input_grad[1] else None
        grad_B = _gradient(A, total, ctx.transposed) if ctx.needs_input_grad[2] else None
        return None, grad_A, grad_B
