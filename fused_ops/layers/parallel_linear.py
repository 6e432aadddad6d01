"""What column- and row-parallel linear layers share: one rank's parameters, drawn and copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from ...symm_mem import Group
from .. import validation
from ..library import group_checks
from .parallel_layer import Factory, ParallelLayer, check_factory, linear_dtype


class ParallelLinear(ParallelLayer):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool,
        sequence: tuple[bool, int],
        factory: Factory,
    ) -> None:
        """As column- and row-parallel layers document it. ``sequence``: whether it is cut, and where."""
        sequence_parallel, sequence_dim = sequence
        validation.validate_sizes(in_features=in_features, out_features=out_features)
        validation.flags(bias=bias, sequence_parallel=sequence_parallel)
        validation.integer("sequence_dim", sequence_dim)
        check_factory(*factory)
        super().__init__(group)
        name, size = ("out_features", out_features) if self.shard_dim == 0 else ("in_features", in_features)
        if size % self.world_size:
            raise ValueError(f"{name}: is {size}, must be a multiple of {self.world_size} ranks")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence
        own = [out_features, in_features]
        own[self.shard_dim] //= self.world_size
        self._make_parameters(own, own[:1] if bias else None, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, in place and as the constructor does.

        >>> from weft.fused_ops import RowParallelLinear
        >>> layer = RowParallelLinear(24, 8, group=None, device="meta").to_empty(device="cpu")
        >>> layer.reset_parameters()
        >>> layer.bias.count_nonzero().item()
        0

        A whole nn.Linear is drawn, for a moment in memory, and the local part kept. A row-parallel layer's bias is
        zero.

        Raises:
            ValueError: the layer was made by another rank or for another number of ranks.
        """
        group_checks.own_rank(self.group, self.rank, self.world_size)
        place = {"device": self.weight.device, "dtype": self.weight.dtype}
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, **place)
        if self.bias_dim is None and self.bias is not None:
            # All ranks hold it whole: drawn, it would differ where their seeds do.
            nn.init.zeros_(linear.bias)
        for name, part in self._parts(linear).items():
            self._overwrite(name, part)

    def _parts(self, linear: nn.Linear) -> dict[str, Tensor]:
        """Views of this rank's part of ``linear``, of each parameter that there is."""
        whole = {"weight": linear.weight, "bias": linear.bias}
        return {name: self._part(name, x) for name, x in whole.items() if x is not None}

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group = None, **options: Any) -> Self:
        """This rank's part of ``linear``, copied: it computes the same function.

        >>> import torch
        >>> from weft.fused_ops import ColumnParallelLinear
        >>> _ = torch.manual_seed(0)  # the same on every rank
        >>> linear, x = torch.nn.Linear(8, 12), torch.randn(4, 8)
        >>> options = {"sequence_parallel": False, "gather_output": True}
        >>> layer = ColumnParallelLinear.from_linear(linear, None, **options)
        >>> torch.testing.assert_close(layer(x), linear(x))

        Args:
            linear: the same on every rank.
            group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
            options: as for the class, without sizes, bias, device and dtype, which are those of ``linear``.

        Raises:
            TypeError: ``linear`` is no nn.Linear, sharded already, or not of a dtype that the layer can have, or an
                option is none, or one that ``linear`` decides.
            ValueError: its size is not a multiple of the number of ranks.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: is {type(linear).__name__}, must be an nn.Linear")
        if isinstance(linear.weight, DTensor):
            raise TypeError("linear.weight: is a DTensor, must be whole on every rank: its full_tensor()")
        validation.float_dtype("linear.weight", linear.weight)
        make: Callable[..., Self] = cls  # a layer's own constructor
        layer = make(
            linear.in_features,
            linear.out_features,
            group=group,
            bias=linear.bias is not None,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        )
        for name, part in layer._parts(linear).items():
            own = part.clone(memory_format=torch.contiguous_format)
            setattr(layer, name, nn.Parameter(own, getattr(linear, name).requires_grad))
        return layer.train(linear.training)

    def _operands(
        self, x: Tensor, columns: int, own: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, which must have so many columns, weight and bias, in the dtype of the product. ``own``: gives this rank's
        columns of x, before they are cast."""
        weight: Tensor = self.weight  # once: a parametrization computes it anew each time
        bias: Tensor | None = self.bias
        self._check(x, weight, columns)
        dtype = linear_dtype(x)
        x = x if own is None else own(x)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

    def _along_sequence(self, x: Tensor) -> int:
        if not (-x.dim() <= self.sequence_dim < x.dim() and self.sequence_dim % x.dim() < x.dim() - 1):
            raise ValueError(
                f"sequence_dim: is {self.sequence_dim}, "
                f"must be a dimension before the last of the {x.dim()}-D input"
            )
        return self.sequence_dim % x.dim()

    def extra_repr(self) -> str:
        kind = f"sequence_dim={self.sequence_dim}" if self.sequence_parallel else "sequence_parallel=False"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank {self.rank} of {self.world_size}, {kind}"
        )
