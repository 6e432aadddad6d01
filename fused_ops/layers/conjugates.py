"""Between a part on each rank and what all ranks hold alike: pairs of functions, each the backward of the other.

A backward calls its conjugate, not the conjugate's collective. The gradient can then be differentiated again: by the
backward of a collective what is whole on each rank already would be summed over the ranks, or not at all. (Experts'
functions have gradients once.) A further pair, SumGradient and SumOverRanks, is in ops/gradients.py.

Rank and size are given: Dynamo does not look for a group by its name in an autograd.Function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..experts_sums import fused_grouped_matmul_all_reduce
from ..functional import fused_matmul_all_reduce
from ..ops.experts.grouped_matmul_sums import ALL_REDUCE_OP, SavedProduct
from ..ops.gradients import SumGradient, all_gather, flat_rows, refuse_second_gradient


class GatherShards(torch.autograd.Function):
    """Joins what the ranks have, along a dimension. All of them use the result alike: its gradient is already whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, rank: int, size: int) -> Tensor:
        ctx.dim, ctx.of = dim, (group, rank, size)
        return all_gather(x, dim, size, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SplitShards.apply(grad, ctx.dim, *ctx.of), None, None, None, None


class SplitShards(torch.autograd.Function):
    """The local part of what every rank holds whole; its gradient is whole again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, rank: int, size: int) -> Tensor:
        ctx.dim, ctx.of = dim, (group, rank, size)
        return x.chunk(size, dim)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return GatherShards.apply(grad, ctx.dim, *ctx.of), None, None, None, None


class SumOfMatmulsOverRanks(torch.autograd.Function):
    """``SumOverRanks`` of ``x @ weight^T``, in one op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str, size: int) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.group = group, size
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return fused_matmul_all_reduce(x, weight.t(), "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else MatmulOfWhole.apply(grad, weight.t(), None, *ctx.group)
        grad_weight = None if x is None else _gradient(SumGradient.apply(grad, *ctx.group), x)
        return grad_x, grad_weight, None, None


class MatmulOfWhole(torch.autograd.Function):
    """``x @ weight^T + bias`` after ``SumGradient``, whose sum is that of products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, size: int) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.group = group, size
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else SumOfMatmulsOverRanks.apply(grad, weight.t(), *ctx.group)
        grad_weight = None if x is None else _gradient(grad, SumGradient.apply(x, *ctx.group))
        grad_bias = flat_rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


class SumOfExpertsOverRanks(torch.autograd.Function):
    """``SumOverRanks`` of experts' outputs, in one op."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Any) -> Tensor:
        x, B, offs, slots, weights, bias, shared = tensors
        _, _, of_B, _, _, of_weights, *_ = ctx.needs_input_grad
        product = SavedProduct(x, B, offs, slots, weights, bias)
        ctx.save_for_backward(*product.without_unneeded(of_B, of_weights))
        named = {"bias": bias, "shared": shared}
        return fused_grouped_matmul_all_reduce(x, B, offs, slots, weights, "sum", group, **named)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(ALL_REDUCE_OP)
        _, of_x, of_B, _, _, of_weights, of_bias, of_shared = ctx.needs_input_grad
        saved = SavedProduct(*ctx.saved_tensors)
        wanted = of_x, of_B, of_weights, of_bias
        grad_x, grad_B, grad_weights, grad_bias = saved.gradients(grad, wanted)
        return None, grad_x, grad_B, None, None, grad_weights, grad_bias, grad if of_shared else None


class OfFirstRank(torch.autograd.Function):
    """Before a sum over ranks of what each of them has whole. Its gradient is whole on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        return torch.zeros_like(x) if rank else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _gradient(grad: Tensor, x: Tensor) -> Tensor:
    """That of ``weight`` in ``x @ weight^T``, of all rows."""
    return flat_rows(grad).t() @ flat_rows(x)
