"""Parallel layers' parts as DTensors, by which torch.distributed.checkpoint knows that they are parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from ...symm_mem import resolve_group
from ..library import group_checks
from .parallel_layer import ParallelLayer

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def sharded_state_dict(module: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A state dict for torch.distributed.checkpoint, which takes plain tensors for the same on every rank.

    >>> import tempfile, torch.distributed as dist, torch.distributed.checkpoint as dcp
    >>> from weft.fused_ops import ColumnParallelLinear, sharded_state_dict
    >>> model = ColumnParallelLinear(8, 12, group=None)
    >>> sharded_state_dict(model)["weight"].shape  # a DTensor, of which this rank holds its rows
    torch.Size([12, 8])
    >>> folder = [tempfile.mkdtemp()]
    >>> dist.broadcast_object_list(folder)  # the same on every rank
    >>> _ = dcp.save(sharded_state_dict(model), checkpoint_id=folder[0])
    >>> dcp.load(sharded_state_dict(model), checkpoint_id=folder[0])  # fills the parameters themselves

    What is saved is what a model of whole layers would save: such a model, and another number of ranks, can load it.
    ``local_state_dict`` has an example with an optimizer's state.

    Args:
        module: a parallel layer, such as a ColumnParallelLinear, or what holds some, however deep.
        state: what to make it of, by default ``module.state_dict()``; may be dicts in dicts, an optimizer's flattened.

    Returns:
        ``state`` with DTensors over the layers' groups in place of their weights and biases, and of tensors of the same
        shapes in dicts under their names. They share the memory. Nothing is communicated.

    Raises:
        TypeError: ``module`` is no nn.Module, ``state`` no mapping, or one of these tensors is a DTensor: those of
            ``fully_shard`` are parts of a part, and do not know it.
        ValueError: a layer was made by another rank, or for another number of ranks than its group has; or ``state``
            has none of these tensors; or has some of which it is not known whether and how they are cut: what a layer's
            weight or bias is made of by a parametrization, weight norm or pruning; an optimizer's state of another
            shape than the parameter's (Adafactor), or under numbers (``optimizer.state_dict()``).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: is of type {type(module).__name__}, must be an nn.Module")
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"state: is of type {type(state).__name__}, must be a mapping")
    layers = {path: m for path, m in module.named_modules() if isinstance(m, ParallelLayer)}
    for path, layer in layers.items():
        if (why := group_checks.why_of_another_rank(layer.group, layer.rank, layer.world_size)) is not None:
            raise ValueError(f"module: {path!r}, {why}" if path else why)
    owners = {
        id(parameter): (layer, cut)
        for path, layer in layers.items()
        for name, cut in (("weight", layer.shard_dim), ("bias", layer.bias_dim))
        for parameter in (_own(path, layer, name),)
    }
    # By identity, as modules may change names in state dicts.
    parts = {
        name: _Part(name, parameter.shape, *owners[id(parameter)])
        for name, parameter in module.state_dict(keep_vars=True).items()
        if isinstance(parameter, Tensor) and id(parameter) in owners
    }
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owners and (name := _bare(module, path)) not in parts:
            parts[name] = _Part(name, parameter.shape, *owners[id(parameter)])
    found = False

    def whole(value: Any, part: _Part | None) -> Any:
        nonlocal found
        if isinstance(value, Mapping):
            _refuse_numbers(value, parts)
            return {key: whole(inner, _under(key, parts) or part) for key, inner in value.items()}
        if part is None or not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor):
            raise TypeError(
                f"state: has a DTensor under {part.name!r}, must have this rank's own tensor there"
            )
        if value.shape != part.shape:
            if part.is_cut and value.dim() > 0:
                raise ValueError(
                    f"state: has a tensor of shape {tuple(value.shape)} under {part.name!r}, must be a number or have "
                    f"the shape of this rank's part, {tuple(part.shape)}: how others are cut is not known, and they "
                    "would be saved as if they were the same on every rank"
                )
            return value
        found = True
        return part.of_whole(value)

    result: dict[str, Any] = whole(module.state_dict() if state is None else state, None)
    if parts and not found:
        raise ValueError(
            f"state: has no tensor under the name of a layer's parameter, must have one under {next(iter(parts))!r}, "
            "say; of a module in a wrapper, give the module"
        )
    return result


def _bare(module: nn.Module, path: str) -> str:
    """A parameter's name as get_state_dict says it: without the wrappers of torch.compile, checkpoints and DDP."""
    kept: list[str] = []
    at: Any = module
    for step in path.split("."):
        if step not in _WRAPPED and not (step == "module" and isinstance(at, DistributedDataParallel)):
            kept.append(step)
        at = getattr(at, step)
    return ".".join(kept)


def _under(key: Any, parts: Mapping[str, _Part]) -> _Part | None:
    """Whose state a key says that it has: a name, or that of a flattened optimizer's state ("state.<name>.<what>")."""
    if not isinstance(key, str) or key in parts:
        return parts.get(key)
    kind, _, name = key.partition(".")
    while kind == "state" and name:
        name = name.rpartition(".")[0]
        if name in parts:
            return parts[name]
    return None


def _refuse_numbers(value: Mapping[Any, Any], parts: Mapping[str, _Part]) -> None:
    state = value.get("state") if "param_groups" in value else None
    if isinstance(state, Mapping) and any(part.is_cut for part in parts.values()):
        for key in state:
            if isinstance(key, int):
                raise ValueError(
                    f"state: has an optimizer's state under the number {key}, must have it under names, as "
                    "get_state_dict gives it: which of it is a part is not known"
                )


def _own(path: str, layer: ParallelLayer, name: str) -> Tensor | None:
    if name not in layer._parameters:
        raise ValueError(
            f"module: {f'{path}.{name}'.lstrip('.')!r} is computed from other tensors, must be the layer's own "
            "parameter: the others would be saved as if they were the same on every rank"
        )
    return layer._parameters[name]


def local_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state``, which ``sharded_state_dict`` has made, with what this rank holds in place of its DTensors.

    >>> import torch
    >>> from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    >>> from weft.fused_ops import ColumnParallelLinear, local_state_dict, sharded_state_dict
    >>> model = ColumnParallelLinear(8, 12, group=None)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    >>> given = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    >>> state = sharded_state_dict(model, given)  # for dcp.save or dcp.load
    >>> local = local_state_dict(state)
    >>> _ = set_state_dict(model, optimizer, model_state_dict=local["model"], optim_state_dict=local["optim"])
    >>> torch.equal(local["model"]["weight"], model.weight)
    True

    The result shares the memory of ``state``. Nothing is communicated.

    Args:
        state: a mapping, maybe of mappings.

    Returns:
        dicts in dicts, like ``state``.
    """

    def own(value: Any) -> Any:
        if isinstance(value, Mapping):
            return local_state_dict(value)
        return value.to_local() if isinstance(value, DTensor) else value

    return {key: own(value) for key, value in state.items()}


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    layer: ParallelLayer
    cut: int | None

    @property
    def is_cut(self) -> bool:
        """Whether the ranks' differ."""
        return self.cut is not None and self.layer.world_size > 1

    def of_whole(self, local: Tensor) -> DTensor:
        # There is no mesh of meta tensors.
        kind = "cpu" if local.is_meta else local.device.type
        mesh = DeviceMesh.from_group(resolve_group(self.layer.group), kind)
        placement = Replicate() if self.cut is None else Shard(self.cut)
        return DTensor.from_local(local, mesh, [placement], run_check=False)
