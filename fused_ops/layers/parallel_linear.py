"""What column- and row-parallel layers share: one rank's parameters, drawn, copied, loaded and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typing_extensions import Self

from ...symm_mem import Group, group_name, resolve_group
from .. import validation
from ..library import group_checks


def _is_autocast(x: Tensor) -> bool:
    kind = x.device.type
    # Not is_autocast_available, at which Dynamo of torch 2.11 breaks the graph.
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def linear_dtype(x: Tensor) -> torch.dtype:
    """What nn.Linear computes x in. The ops, unlike it, cast nothing under autocast."""
    return torch.get_autocast_dtype(x.device.type) if _is_autocast(x) else x.dtype


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in validation.DTYPES:
        raise TypeError(f"{name}: is {dtype}, must be float32, bfloat16 or float16")


@dataclass(frozen=True)
class ParallelLinearOptions:
    """What column- and row-parallel layers are made with, as it was given; documented there.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """

    in_features: int
    out_features: int
    group: Group
    bias: bool
    sequence_parallel: bool
    sequence_dim: int
    device: torch.device | str | None
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        validation.validate_sizes(in_features=self.in_features, out_features=self.out_features)
        validation.flags(bias=self.bias, sequence_parallel=self.sequence_parallel)
        validation.integer("sequence_dim", self.sequence_dim)
        validation.validate_factory(self.device, self.dtype)
        default = torch.get_default_dtype()
        if self.dtype is None and default not in validation.DTYPES:
            raise TypeError(
                f"dtype: is None, torch's default, {default}, must be float32, bfloat16 or float16"
            )


class ParallelLinear(nn.Module):
    shard_dim: int  # of the weight [out_features, in_features]
    bias_dim: int | None  # None: every rank has the whole bias

    def __init__(self, options: ParallelLinearOptions) -> None:
        super().__init__()
        in_features, out_features = options.in_features, options.out_features
        # The name and not the ProcessGroup: the module can be copied and saved.
        self.group = group_name(options.group)
        group = resolve_group(options.group)
        self.rank, self.world_size = group.rank(), group.size()
        name, size = ("out_features", out_features) if self.shard_dim == 0 else ("in_features", in_features)
        if size % self.world_size:
            raise ValueError(f"{name}: is {size}, must be a multiple of {self.world_size} ranks")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = options.sequence_parallel, options.sequence_dim
        own = [out_features, in_features]
        own[self.shard_dim] //= self.world_size
        factory: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
        self.weight = nn.Parameter(torch.empty(own, **factory))
        if options.bias:
            self.bias = nn.Parameter(torch.empty(own[0], **factory))
        else:
            self.register_parameter("bias", None)
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
        with torch.no_grad():
            for name, part in self._parts(linear).items():
                parameter = self.get_parameter(name)
                if isinstance(parameter, DTensor):  # fully_shard's, of the part, which each rank has drawn
                    mesh, placements = parameter.device_mesh, parameter.placements
                    parameter.copy_(distribute_tensor(part, mesh, placements, src_data_rank=None))
                else:
                    parameter.copy_(part)

    def _parts(self, linear: nn.Linear) -> dict[str, Tensor]:
        """Views of this rank's part of ``linear``, of each parameter that there is."""
        parts = {"weight": linear.weight.detach().chunk(self.world_size, self.shard_dim)[self.rank]}
        bias: Tensor | None = linear.bias
        if bias is not None:
            whole = bias.detach()
            parts["bias"] = whole if self.bias_dim is None else whole.chunk(self.world_size)[self.rank]
        return parts

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
        _check_dtype("linear.weight", linear.weight.dtype)
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also from what ``sharded_state_dict`` has made, when torch.distributed.checkpoint has filled it."""
        for name in ("weight", "bias"):
            key, own = prefix + name, self._parameters.get(name)
            given = state_dict.get(key)
            if isinstance(given, DTensor) and own is not None and not isinstance(own, DTensor):
                problem = self._is_not_own(name, given)
                if problem is not None:
                    args[-1].append(f"{key}: {problem}")  # torch raises all of them at the end
                state_dict[key] = given.to_local() if problem is None else own
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _is_not_own(self, name: str, given: DTensor) -> str | None:
        """Why what each rank holds of a DTensor is not its part of the layer. It may have the same sizes all the same.

        Of what is cut the answer is the same on all ranks, also on those whose part it happens to be.
        """
        if (problem := group_checks.why_of_another_rank(self.group, self.rank, self.world_size)) is not None:
            return problem
        whole = list(self.get_parameter(name).shape)
        cut = self.shard_dim if name == "weight" else self.bias_dim
        ranks = dist.get_process_group_ranks(resolve_group(self.group))
        wanted: list[Any] = []
        if cut is not None:
            whole[cut] *= self.world_size
            wanted = [(Shard(cut), ranks)] if self.world_size > 1 else []
        mesh = given.device_mesh
        found: list[Any] = []
        at = mesh.get_coordinate()
        for dim, placement in enumerate(given.placements):
            if mesh.size(dim) > 1 and not placement.is_replicate():
                along = [slice(None) if other == dim else i for other, i in enumerate(at or ())]
                with unset_fake_temporarily():  # a mesh is no part of what is traced
                    found.append((placement, mesh.mesh[tuple(along)].tolist()))
        if list(given.shape) == whole and found == wanted and at is not None:
            return None
        how = f"{Shard(cut)!r} over" if cut is not None else "the same on"
        return (
            f"is a DTensor of shape {tuple(given.shape)} with {given.placements} over {mesh}, must have shape "
            f"{tuple(whole)} and be {how} ranks {ranks}, the layer's, as sharded_state_dict gives it"
        )

    def _check(self, x: Tensor, weight: Tensor, columns: int) -> None:
        group_checks.own_rank(self.group, self.rank, self.world_size)
        validation.tensor("x", x, 1)
        if x.shape[-1] != columns:
            raise ValueError(f"x: has {x.shape[-1]} columns, must have {columns}")
        if x.device != weight.device:
            raise ValueError(f"x: lies on {x.device}, must lie on {weight.device} like the weight")
        # Here, not in the constructor alone: module.double() comes later.
        _check_dtype("weight", weight.dtype)
        if _is_autocast(x):
            _check_dtype("x", x.dtype)
        elif x.dtype != weight.dtype:
            raise TypeError(f"x: is {x.dtype}, must be {weight.dtype} like the weight")

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
