"""Linear layers for models sharded by hand, Megatron style: a column-parallel layer feeds a row-parallel one.

By default the activations outside of the pair are whole on every rank, and the way out is a matmul_all_reduce; so is
that of the gradient. With ``sequence_parallel`` they are cut along the sequence, and communication is hidden by the
products: all_gather_matmul on the way in, matmul_reduce_scatter on the way out.

A layer's state_dict has this rank's parts. torch.distributed.checkpoint must be told so: ``sharded_state_dict``.

Shapes below are those of one rank. W is the number of ranks, S the size of the sequence dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from ...symm_mem import Group
from .. import validation
from ..functional import fused_all_gather_matmul, fused_matmul_reduce_scatter
from ..library import group_checks
from .conjugates import GatherShards, MatmulOfWhole, SplitShards, SumOfMatmulsOverRanks
from .parallel_layer import Factory, ParallelLayer, check_factory, linear_dtype


class ParallelLinear(ParallelLayer):
    """What both share: one rank's parameters, drawn and copied."""

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


class ColumnParallelLinear(ParallelLinear):
    """``y = x @ weight^T + bias`` with the rows of ``weight``, the columns of y, cut into one part a rank.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import ColumnParallelLinear, RowParallelLinear
    >>> W = dist.get_world_size()
    >>> up = ColumnParallelLinear(8, 12 * W, group=None)
    >>> down = RowParallelLinear(12 * W, 8, group=None)
    >>> hidden = up(torch.ones(4, 8))  # the same x on every rank; this rank's columns of the result
    >>> hidden.shape
    torch.Size([4, 12])
    >>> down(hidden.relu()).shape
    torch.Size([4, 8])
    >>> up = ColumnParallelLinear(8, 12 * W, group=None, sequence_parallel=True)
    >>> down = RowParallelLinear(12 * W, 8, group=None, sequence_parallel=True)
    >>> hidden = up(torch.randn(4, 8))  # this rank's part of the sequence
    >>> hidden.shape == (4 * W, 12)
    True
    >>> down(hidden.relu()).shape
    torch.Size([4, 8])

    The forward is a plain matmul, the gradient of x a ``fused_matmul_all_reduce``. With ``sequence_parallel`` the
    forward is ``fused_all_gather_matmul``, and the gradient of x a ``fused_matmul_reduce_scatter``: an x that is whole
    on each rank must not be given then, as it would be taken for a part, and gradients would be W times too large.
    Layers that share an input gather it once through one ``fused_all_gather_matmul`` with all their weights.
    Parameters between the layers then need ``all_reduce_gradients``.

    Computes as nn.Linear does, also under autocast. The scheme is `Megatron-LM's <https://arxiv.org/abs/1909.08053>`_
    (Shoeybi et al., 2019), with `sequence parallelism <https://arxiv.org/abs/2205.05198>`_ (Korthikanti et al., 2022).

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; a multiple of the number of ranks, W.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: whether there is one.
        sequence_parallel: whether x is cut along the sequence; otherwise it is whole and the same on every rank. Off
            unless asked for, as Megatron-LM's.
        sequence_dim: the dimension that is cut; may be negative, not the last one.
        gather_output: whether y is wanted with all columns on every rank.
        device: of the parameters. The whole layer is drawn and the local part kept: ranks that are seeded alike get
            the parts of one nn.Linear.
        dtype: of the parameters: float32, bfloat16 or float16; default ``torch.get_default_dtype()``.

    Attributes:
        weight: [out_features / W, in_features].
        bias: [out_features / W], or None.

    Raises:
        ValueError, TypeError: naming the argument; ``out_features`` is not a multiple of W.
    """

    shard_dim, bias_dim = 0, 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sequence, factory = (sequence_parallel, sequence_dim), (device, dtype)
        super().__init__(in_features, out_features, group, bias, sequence, factory)
        validation.flags(gather_output=gather_output)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight^T + bias``, this rank's columns of it.

        >>> import torch
        >>> from weft.fused_ops import ColumnParallelLinear
        >>> layer = ColumnParallelLinear(8, 12, group=None, gather_output=True)
        >>> layer(torch.ones(2, 4, 8)).shape
        torch.Size([2, 4, 12])

        Args:
            x: [..., in_features]; with ``sequence_parallel`` [..., S / W, ..., in_features], all-gathered.

        Returns:
            [..., S, ..., out_features / W]; all columns with ``gather_output``.

        Raises:
            ValueError, TypeError: x does not fit, or the layer was made by another rank or for another number of them.
        """
        x, weight, bias = self._operands(x, self.in_features)
        if self.sequence_parallel:
            along = self._along_sequence(x)
            _, (y,) = fused_all_gather_matmul(x, [weight.t()], along, self.group, return_A=False)
            y = y if bias is None else y + bias
        else:
            y = MatmulOfWhole.apply(torch.atleast_2d(x), weight, bias, self.group, self.world_size)
            y = y if x.dim() > 1 else y[0]
        return GatherShards.apply(y, -1, self.group, self.rank, self.world_size) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """``y = all_reduce(x @ weight^T) + bias`` with the columns of ``weight`` and x cut into one part a rank.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import RowParallelLinear
    >>> W = dist.get_world_size()
    >>> down = RowParallelLinear(12 * W, 8, group=None)
    >>> down(torch.randn(4, 12)).shape  # this rank's columns of x; the sum is the same on all ranks
    torch.Size([4, 8])

    The forward is a ``fused_matmul_all_reduce``, the gradient of x a plain matmul. With ``sequence_parallel`` the
    forward is ``fused_matmul_reduce_scatter``, and the gradient of x a ``fused_all_gather_matmul``.

    The bias is whole on every rank and added once, after the sum over ranks. Its gradient is whole, too. It is zero at
    first, not drawn: the same on all ranks without a broadcast, also where they are seeded differently.

    Args:
        in_features: of the whole layer; a multiple of the number of ranks, W.
        out_features: of the whole layer.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: whether there is one.
        sequence_parallel: whether y is wanted cut along the sequence, which needs S to be a multiple of W;
            otherwise it is whole on every rank. Off unless asked for, as Megatron-LM's.
        sequence_dim: the dimension that is cut; may be negative, not the last one.
        input_is_parallel: whether x has this rank's columns only, as a ColumnParallelLinear gives them; otherwise
            it is whole and the same on every rank.
        device: as for ColumnParallelLinear.
        dtype: as for ColumnParallelLinear.

    Attributes:
        weight: [out_features, in_features / W].
        bias: [out_features], or None.

    Raises:
        ValueError, TypeError: naming the argument; ``in_features`` is not a multiple of W.
    """

    shard_dim, bias_dim = 1, None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sequence, factory = (sequence_parallel, sequence_dim), (device, dtype)
        super().__init__(in_features, out_features, group, bias, sequence, factory)
        validation.flags(input_is_parallel=input_is_parallel)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """``all_reduce(x @ weight^T) + bias``, or with ``sequence_parallel`` this rank's part of it.

        >>> import torch
        >>> from weft.fused_ops import RowParallelLinear
        >>> layer = RowParallelLinear(24, 8, group=None, input_is_parallel=False)
        >>> layer(torch.ones(2, 4, 24)).shape
        torch.Size([2, 4, 8])

        Args:
            x: [..., S, ..., in_features / W]; all columns without ``input_is_parallel``.

        Returns:
            [..., out_features]; with ``sequence_parallel`` [..., S / W, ..., out_features].

        Raises:
            ValueError, TypeError: x does not fit, or the layer was made by another rank or for another number of them.
        """
        if self.input_is_parallel:
            x, weight, bias = self._operands(x, self.in_features // self.world_size)
        else:
            x, weight, bias = self._operands(x, self.in_features, self._own_columns)
        if not self.sequence_parallel:
            y = SumOfMatmulsOverRanks.apply(torch.atleast_2d(x), weight, self.group, self.world_size)
            y = y if x.dim() > 1 else y[0]
            return y if bias is None else y + bias
        along = self._along_sequence(x)
        if x.shape[along] % self.world_size:
            raise ValueError(
                f"x: has size {x.shape[along]} in dimension {along}, the sequence, "
                f"must have a multiple of {self.world_size} ranks there"
            )
        return fused_matmul_reduce_scatter(x, weight.t(), "sum", along, self.group, bias=bias)

    def _own_columns(self, x: Tensor) -> Tensor:
        return SplitShards.apply(x, -1, self.group, self.rank, self.world_size)  # type: ignore[no-any-return]
