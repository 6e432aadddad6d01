"""What column- and row-parallel layers of experts share: one rank's parameters, drawn and copied, and its routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from ...symm_mem import Group
from .. import validation
from ..experts import moe_route
from ..library import group_checks
from .parallel_layer import Factory, ParallelLayer, check_factory, linear_dtype

_UNIT = 8  # what sizes of a grouped product are multiples of


class ParallelExperts(ParallelLayer):
    cut: int  # the dimension of an expert's weight [.., out_features, in_features] that is cut

    def __init__(
        self, sizes: tuple[int, ...], group: Group, bias: bool, how: tuple[bool, bool, bool], factory: Factory
    ) -> None:
        """As the layers document it. ``sizes``: in_features, out_features and num_experts; ``how``: gated,
        expert_parallel and sequence_parallel."""
        in_features, out_features, num_experts = sizes
        validation.validate_sizes(in_features=in_features, out_features=out_features, num_experts=num_experts)
        gated, expert_parallel, sequence_parallel = how
        flags = {"expert_parallel": expert_parallel, "sequence_parallel": sequence_parallel}
        validation.flags(bias=bias, gated=gated, **flags)
        check_factory(*factory)
        super().__init__(group)
        self.in_features, self.out_features, self.num_experts = sizes
        self.gated, self.expert_parallel, self.sequence_parallel = how
        own = [self.num_experts, *(2,) * gated, self.out_features, self.in_features]
        # Of a bias [E, .., out_features] the same dimension is cut, unless it is that of in_features.
        self.shard_dim = 0 if expert_parallel else len(own) + self.cut
        self.bias_dim = self.shard_dim if self.shard_dim < len(own) - 1 else None
        names = {0: "num_experts", len(own) - 2: "out_features", len(own) - 1: "in_features"}
        for dim, name in names.items():
            ranks = self.world_size if dim == self.shard_dim else 1
            unit = ranks * (_UNIT if dim else 1)
            if own[dim] % unit:
                each = f" {ranks} ranks" if not dim else f" {unit}: {_UNIT} for each of {ranks} ranks"
                raise ValueError(f"{name}: is {own[dim]}, must be a multiple of{each}")
        own[self.shard_dim] //= self.world_size
        self._make_parameters(own, own[:-1] if bias else None, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, in place and as the constructor does.

        >>> from weft.fused_ops import RowParallelExperts
        >>> layer = RowParallelExperts(32, 8, 4, group=None, device="meta").to_empty(device="cpu")
        >>> layer.reset_parameters()
        >>> layer.bias.count_nonzero().item()
        0

        One whole expert is drawn after the other, as an nn.Linear, and the local part kept. A bias that every rank has
        is zero.

        Raises:
            ValueError: the layer was made by another rank or for another number of ranks.
        """
        group_checks.own_rank(self.group, self.rank, self.world_size)
        place = {"device": self.weight.device, "dtype": self.weight.dtype}
        outs = self.out_features * (1 + self.gated)
        found: dict[str, list[Tensor]] = {"weight": [], "bias": []}
        own = self._own_experts()
        for expert in range(self.num_experts):
            linear = nn.Linear(self.in_features, outs, bias=self.bias is not None, **place)
            if self.bias is not None and self.bias_dim is None:
                nn.init.zeros_(linear.bias)
            if expert in own:
                for name, whole in linear.named_parameters():
                    wide = whole.unflatten(0, (2, -1)) if self.gated else whole
                    found[name].append(self._part_of_expert(name, wide))
        for name, parts in found.items():
            if parts:
                self._overwrite(name, torch.stack(parts))

    def _own_experts(self) -> range:
        if not self.expert_parallel:
            return range(self.num_experts)
        each = self.num_experts // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def _part_of_expert(self, name: str, whole: Tensor) -> Tensor:
        return whole.detach() if self.expert_parallel else self._part(name, whole[None])[0].clone()

    @classmethod
    def from_weights(
        cls, weight: Tensor, bias: Tensor | None = None, group: Group = None, **options: Any
    ) -> Self:
        """This rank's part of experts that every rank has whole, copied.

        >>> import torch
        >>> from weft.fused_ops import ColumnParallelExperts
        >>> gate_up = torch.randn(4, 2, 32, 8)  # the same on every rank
        >>> layer = ColumnParallelExperts.from_weights(gate_up, expert_parallel=False)
        >>> layer.gated, layer.num_experts
        (True, 4)

        Args:
            weight: [E, out_features, in_features], the same on every rank; of experts with two products, as gate and
                up, [E, 2, out_features, in_features].
            bias: [E, out_features] or [E, 2, out_features], or None.
            group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
            options: as for the class, without sizes, bias, gated, device and dtype, which are those of ``weight``.

        Raises:
            TypeError: ``weight`` is sharded already, or not of a dtype that the layer can have, or an option is none.
            ValueError: a shape or size does not fit.
        """
        for name, given in (("weight", weight), ("bias", bias)):
            if isinstance(given, DTensor):
                raise TypeError(f"{name}: is a DTensor, must be whole on every rank: its full_tensor()")
        if "gated" in options:
            raise TypeError("gated: is an option, must not be one: the shape of weight says it")
        validation.tensor("weight", weight)
        validation.float_dtype("weight", weight)
        gated = weight.dim() == 4
        if weight.dim() not in (3, 4) or (gated and weight.shape[1] != 2):
            raise ValueError(
                f"weight: has shape {tuple(weight.shape)}, must be [E, out_features, in_features] or [E, 2, ...]"
            )
        if gated and cls.cut == -1:
            raise ValueError(
                f"weight: has shape {tuple(weight.shape)}, must be [E, out_features, in_features]"
            )
        if bias is not None:
            validation.tensor("bias", bias)
            if bias.shape != weight.shape[:-1]:
                raise ValueError(
                    f"bias: has shape {tuple(bias.shape)}, must have {tuple(weight.shape[:-1])} like weight"
                )
            validation.like_tensor("bias", bias, weight, "weight")
        more = {"gated": True} if gated else {}
        make: Callable[..., Self] = cls
        sizes = weight.shape[-1], weight.shape[-2], weight.shape[0]
        has_bias = bias is not None
        layer = make(*sizes, group=group, bias=has_bias, device="meta", dtype=weight.dtype, **more, **options)
        for name, whole in (("weight", weight), ("bias", bias)):
            if whole is not None:
                own = layer._part(name, whole).clone(memory_format=torch.contiguous_format)
                setattr(layer, name, nn.Parameter(own))
        return layer

    def route(self, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``moe_route`` for the experts that this rank has, or has slices of.

        >>> import torch
        >>> from weft.fused_ops import ColumnParallelExperts
        >>> layer = ColumnParallelExperts(8, 32, 4, group=None)
        >>> rows, offs, slots = layer.route(torch.tensor([[1, 0], [3, 1]]))
        >>> offs.tolist()
        [1, 3, 3, 4]

        Args:
            topk_ids: [T, k], int32 or int64: the experts of each token, of all ranks' tokens.

        Returns:
            (rows, offs, slots), as ``moe_route`` gives them.

        Raises:
            ValueError, TypeError: ``topk_ids`` does not fit.
        """
        own = self._own_experts()
        named = {"first_expert": own.start, "num_local_experts": len(own)}
        return moe_route(topk_ids, self.num_experts, **named)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, B [E, K, N] and the bias [E, N], in the dtype of the product."""
        weight: Tensor = self.weight  # once: a parametrization computes it anew each time
        bias: Tensor | None = self.bias
        self._check(x, weight, weight.shape[-1])
        dtype = linear_dtype(x)
        B = weight.to(dtype).flatten(1, -2).mT
        return x.to(dtype), B, None if bias is None else bias.to(dtype).flatten(1)

    def extra_repr(self) -> str:
        kind = "whole experts" if self.expert_parallel else "slices of experts"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_experts={self.num_experts}, "
            f"bias={self.bias is not None}, {kind}, rank {self.rank} of {self.world_size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )
