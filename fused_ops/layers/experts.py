"""Experts of a mixture, sharded by hand: a column-parallel layer, an activation, and a row-parallel layer.

Each expert is cut into one part a rank, as the linear layers are, or with ``expert_parallel`` each rank has whole
experts. In both cases the tokens of all ranks meet this rank's weights, and ranks' sums are added up.

Shapes below are those of one rank. W is the number of ranks, T the number of all tokens, E that of all experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...symm_mem import Group
from .. import validation
from ..experts import fused_all_gather_grouped_matmul, grouped_matmul
from ..experts_sums import fused_grouped_matmul_reduce_scatter
from ..ops.gradients import SumGradient
from .conjugates import OfFirstRank, SumOfExpertsOverRanks
from .parallel_experts import ParallelExperts


class ColumnParallelExperts(ParallelExperts):
    """``y[i] = x[rows[i]] @ weight[e]^T + bias[e]``, each expert's columns of y cut into one part a rank.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import ColumnParallelExperts, RowParallelExperts
    >>> W = dist.get_world_size()
    >>> up = ColumnParallelExperts(8, 16 * W, 4, group=None, gated=True)
    >>> down = RowParallelExperts(16 * W, 8, 4, group=None)
    >>> x, weights = torch.ones(3, 8), torch.full((3, 2), 0.5)  # 3 tokens, the same on every rank
    >>> rows, offs, slots = up.route(torch.tensor([[1, 0], [3, 1], [2, 0]]))
    >>> hidden = up(x, rows, offs, swiglu=True)
    >>> hidden.shape
    torch.Size([6, 16])
    >>> down(hidden, offs, slots, weights).shape
    torch.Size([3, 8])

    The forward is a ``grouped_matmul``, the gradient of x summed over the ranks. With ``sequence_parallel`` the forward
    is ``fused_all_gather_grouped_matmul``, and the gradient of x reduce-scattered. What a router chose must then be of
    all ranks' tokens: gather the ids. Gradients once; a second one is refused.

    Args:
        in_features: of each expert, a multiple of 8.
        out_features: of each expert, a multiple of 8 for each rank.
        num_experts: of all ranks; with ``expert_parallel`` a multiple of the number of ranks, W.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: whether each expert has one.
        gated: whether an expert has two products, gate and up, in one weight.
        expert_parallel: whether each rank has E / W whole experts; otherwise it has slices of all of them.
        sequence_parallel: whether x is cut along the tokens; otherwise it is whole and the same on every rank.
        device: of the parameters. Ranks that are seeded alike get the parts of the same experts.
        dtype: of the parameters: float32, bfloat16 or float16; default ``torch.get_default_dtype()``.

    Attributes:
        weight: [E, out_features / W, in_features], or [E / W, out_features, in_features] with ``expert_parallel``; if
            gated with 2 as its second dimension.
        bias: the same without in_features, or None.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """

    cut = -2

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        *,
        group: Group = None,
        bias: bool = True,
        gated: bool = False,
        expert_parallel: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes, how = (in_features, out_features, num_experts), (gated, expert_parallel, sequence_parallel)
        super().__init__(sizes, group, bias, how, (device, dtype))

    def forward(self, x: Tensor, rows: Tensor, offs: Tensor, *, swiglu: bool = False) -> Any:
        """The rows of this rank's experts or slices; if gated, those of gate and of up.

        >>> import torch
        >>> from weft.fused_ops import ColumnParallelExperts
        >>> layer = ColumnParallelExperts(8, 32, 4, group=None, expert_parallel=True)
        >>> rows, offs, slots = layer.route(torch.tensor([[1], [0]]))
        >>> layer(torch.ones(2, 8), rows, offs).shape
        torch.Size([2, 32])

        Args:
            x: [T, in_features]; with ``sequence_parallel`` [T / W, in_features], all-gathered.
            rows: of ``route``.
            offs: of ``route``.
            swiglu: whether ``silu(gate) * up`` of a gated layer is wanted, as of ``grouped_matmul``.

        Returns:
            [T * k, out_features / W], or out_features with ``expert_parallel``; if gated without ``swiglu``, a tuple of
            two. Rows from ``offs[-1]`` on hold anything.

        Raises:
            ValueError, TypeError: an argument does not fit, or the layer was made by another rank.
        """
        validation.flags(swiglu=swiglu)
        if swiglu and not self.gated:
            raise ValueError("swiglu: is True, must be False: the layer is not gated")
        x, B, bias = self._operands(x)
        if self.sequence_parallel:
            named: dict[str, Any] = {"biases": None if bias is None else [bias], "swiglu": swiglu}
            _, (y,) = fused_all_gather_grouped_matmul(x, [B], rows, offs, 0, self.group, **named)
        else:
            x = SumGradient.apply(x, self.group, self.world_size)
            y = grouped_matmul(x, B, offs, rows=rows, bias=bias, swiglu=swiglu)
        return y.chunk(2, 1) if self.gated and not swiglu else y


class RowParallelExperts(ParallelExperts):
    """``y[t] = all_reduce(sum over k of weights[t, k] * (x @ weight[e]^T + bias[e])[slots[t, k]])``.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import RowParallelExperts
    >>> W = dist.get_world_size()
    >>> down = RowParallelExperts(16 * W, 8, 4, group=None)
    >>> rows, offs, slots = down.route(torch.tensor([[1, 0], [3, 1]]))
    >>> down(torch.randn(4, 16), offs, slots, torch.full((2, 2), 0.5)).shape
    torch.Size([2, 8])

    The forward is a ``fused_grouped_matmul_all_reduce``, with ``sequence_parallel`` a
    ``fused_grouped_matmul_reduce_scatter``. Of slices of experts the bias is whole on every rank and added once; its
    gradient is whole, too, and it is zero at first. Gradients once; a second one is refused.

    Args:
        in_features: of each expert, a multiple of 8 for each rank.
        out_features: of each expert, a multiple of 8.
        num_experts: as for ColumnParallelExperts.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: whether each expert has one.
        expert_parallel: as for ColumnParallelExperts.
        sequence_parallel: whether y is wanted cut along the tokens, whose number is a multiple of W then; otherwise it
            is whole on every rank.
        device: as for ColumnParallelExperts.
        dtype: as for ColumnParallelExperts.

    Attributes:
        weight: [E, out_features, in_features / W], or [E / W, out_features, in_features] with ``expert_parallel``.
        bias: [E, out_features], or [E / W, out_features] with ``expert_parallel``, or None.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """

    cut = -1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        *,
        group: Group = None,
        bias: bool = True,
        expert_parallel: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes, how = (in_features, out_features, num_experts), (False, expert_parallel, sequence_parallel)
        super().__init__(sizes, group, bias, how, (device, dtype))

    def forward(
        self, x: Tensor, offs: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """What the experts' outputs of each token add up to; with ``sequence_parallel`` of this rank's tokens.

        >>> import torch
        >>> from weft.fused_ops import RowParallelExperts
        >>> layer = RowParallelExperts(16, 8, 4, group=None, expert_parallel=True)
        >>> rows, offs, slots = layer.route(torch.tensor([[1], [0]]))
        >>> layer(torch.ones(2, 16), offs, slots, torch.ones(2, 1)).shape
        torch.Size([2, 8])

        Args:
            x: [T * k, in_features / W], as ColumnParallelExperts gives its rows; in_features with ``expert_parallel``.
            offs: of ``route``.
            slots: of ``route``.
            weights: [T, k], of the dtype of x or float32, the same on every rank: those of all ranks' tokens. Their
                gradient is whole; with ``sequence_parallel`` it is this rank's part of a sum over the ranks, as the
                gradient of ``one_shot_all_gather`` expects it.
            shared: [T, out_features], added to this rank's rows before the sum over ranks, such as a shared expert's
                partial product; or None.

        Returns:
            [T, out_features], or [T / W, out_features] with ``sequence_parallel``.

        Raises:
            ValueError, TypeError: an argument does not fit, or the layer was made by another rank.
        """
        x, B, bias = self._operands(x)
        if shared is not None and torch.is_autocast_enabled(x.device.type):
            shared = shared.to(x.dtype)
        if bias is not None and self.bias_dim is None:
            bias = OfFirstRank.apply(bias, self.rank)
        product = x, B, offs, slots
        if self.sequence_parallel:
            named: dict[str, Any] = {"bias": bias, "shared": shared}
            return fused_grouped_matmul_reduce_scatter(*product, weights, "sum", 0, self.group, **named)
        weights = SumGradient.apply(weights, self.group, self.world_size)
        found: Tensor = SumOfExpertsOverRanks.apply(self.group, *product, weights, bias, shared)
        return found
