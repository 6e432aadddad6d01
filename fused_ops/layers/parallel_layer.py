"""What parallel layers share: parameters of which each rank has a part, how they are loaded, and what x must be."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...symm_mem import Group, group_name, resolve_group
from .. import validation
from ..library import group_checks
from ..library.implement import refuse_transform

Factory: TypeAlias = tuple[torch.device | str | None, torch.dtype | None]  # what parameters are made with


def _is_autocast(x: Tensor) -> bool:
    kind = x.device.type
    # Not is_autocast_available, at which Dynamo of torch 2.11 breaks the graph.
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def linear_dtype(x: Tensor) -> torch.dtype:
    """What nn.Linear computes x in. The ops, unlike it, cast nothing under autocast."""
    return torch.get_autocast_dtype(x.device.type) if _is_autocast(x) else x.dtype


def check_factory(device: Any, dtype: Any) -> None:
    """Where parameters may lie, and their dtype; None is torch's default."""
    if dtype is not None and dtype not in validation.DTYPES:
        raise TypeError(f"dtype: is {dtype!r}, must be float32, bfloat16 or float16")
    if device is not None and not isinstance(device, (torch.device, str)):
        raise TypeError(f"device: is {device!r}, must be a torch.device or its name")
    try:
        torch.device(device or "cpu")
    except RuntimeError as e:
        raise ValueError(f"device: torch knows none that is called {device!r}") from e
    default = torch.get_default_dtype()
    if dtype is None and default not in validation.DTYPES:
        raise TypeError(f"dtype: is None, torch's default, {default}, must be float32, bfloat16 or float16")


class ParallelLayer(nn.Module):
    """``weight``, and perhaps ``bias``."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shard_dim: int  # the weight's
    bias_dim: int | None  # None: every rank has the whole bias

    def __init__(self, group: Group) -> None:
        super().__init__()
        # The name and not the ProcessGroup: the module can be copied and saved.
        self.group = group_name(group)
        found = resolve_group(group)
        self.rank, self.world_size = found.rank(), found.size()

    def _make_parameters(self, own: list[int], bias: list[int] | None, factory: Factory) -> None:
        """Of these sizes; ``bias``: None without one."""
        device, dtype = factory
        for name, sizes in (("weight", own), ("bias", bias)):
            made = None if sizes is None else nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))
            self.register_parameter(name, made)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """A view of this rank's part of the whole layer's parameter of that name."""
        whole, dim = whole.detach(), self.shard_dim if name == "weight" else self.bias_dim
        return whole if dim is None else whole.chunk(self.world_size, dim)[self.rank]

    def _overwrite(self, name: str, part: Tensor) -> None:
        parameter = self.get_parameter(name)
        with torch.no_grad():
            if isinstance(parameter, DTensor):  # fully_shard's, of the part, which each rank has drawn
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(part, mesh, placements, src_data_rank=None))
            else:
                parameter.copy_(part)

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
        refuse_transform(type(self).__name__)
        validation.tensor("x", x, 1)
        if x.shape[-1] != columns:
            raise ValueError(f"x: has {x.shape[-1]} columns, must have {columns}")
        if x.device != weight.device:
            raise ValueError(f"x: lies on {x.device}, must lie on {weight.device} like the weight")
        # Here, not in the constructor alone: module.double() comes later.
        validation.float_dtype("weight", weight)
        if _is_autocast(x):
            validation.float_dtype("x", x)
        elif x.dtype != weight.dtype:
            raise TypeError(f"x: is {x.dtype}, must be {weight.dtype} like the weight")
