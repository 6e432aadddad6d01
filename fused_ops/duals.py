"""Between a part on each rank and what all ranks hold alike: two pairs of functions, each the backward of the other.

A backward calls its dual, not the dual's collective. The gradient can then be differentiated again: by the backward
of a collective what is whole on each rank already would be summed over the ranks, or not at all.

Rank and size are given to Gather and Split: Dynamo does not look for a group by its name in an autograd.Function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .functional import one_shot_all_reduce


class SumGradient(torch.autograd.Function):
    """Before what every rank uses for a part of the result: each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Sum.apply(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """Sums what the ranks hold. All of them use the sum alike: its gradient is already whole on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return one_shot_all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumGradient.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """Joins the columns of all ranks. All of them use the result alike: its gradient is already whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, size: int) -> Tensor:
        ctx.group, ctx.rank, ctx.size = group, rank, size
        collectives = torch.ops._c10d_functional
        columns = x.movedim(-1, 0).contiguous()
        pending = collectives.all_gather_into_tensor(columns, size, group)
        return collectives.wait_tensor(pending).movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Split.apply(grad, ctx.group, ctx.rank, ctx.size), None, None, None


class Split(torch.autograd.Function):
    """The own columns of what every rank holds whole; its gradient is whole again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, size: int) -> Tensor:
        ctx.group, ctx.rank, ctx.size = group, rank, size
        return x.chunk(size, -1)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Gather.apply(grad, ctx.group, ctx.rank, ctx.size), None, None, None
