"""Parameters that are sharded as by ``fully_shard`` and gathered where they are read, inside of the graph.

As SimpleFSDP of torchtitan has it: a parameter is a DTensor of the data-parallel mesh, and reading it is a
redistribution, whose backward scatters the gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def _again(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


class WholeParameter(nn.Module):
    """A shard to the whole parameter, which each rank of the data-parallel mesh then has.

    Args:
        tensor: the mesh and the placements of tensor parallelism, if there is any.
        param_dtype, reduce_dtype: what travels forward and backward; None for the parameter's dtype.
        reshard: the backward gathers again.
    """

    def __init__(
        self,
        tensor: tuple[DeviceMesh, Any] | None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard: bool = False,
    ) -> None:
        super().__init__()
        self.tensor, self.reshard = tensor, reshard
        self.dtypes = {"forward_dtype": param_dtype, "backward_dtype": reduce_dtype}

    def forward(self, shard: DTensor) -> Tensor:
        if not self.reshard or not torch.is_grad_enabled():
            whole = self._gathered(shard)
        else:
            contexts = partial(create_selective_checkpoint_contexts, _again)
            whole = checkpoint(self._gathered, shard, use_reentrant=False, context_fn=contexts)
        return whole if self.tensor is None else DTensor.from_local(whole, *self.tensor, run_check=False)

    def _gathered(self, shard: DTensor) -> Tensor:
        dims = shard.device_mesh.ndim
        whole = shard.redistribute(placements=[Replicate()] * dims, **self.dtypes)
        return whole.to_local(grad_placements=[Partial("avg")] * dims)


def shard_parameters(model: nn.Module, mesh: DeviceMesh, **policy: Any) -> None:
    """Shards over the last dimension of the mesh, replicates over the one before.

    Args:
        policy: of ``WholeParameter``.
    """
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for module in [*model.modules()]:
        for name, given in [*module.named_parameters(recurse=False)]:
            sharded = isinstance(given, DTensor)
            tensor = (given.device_mesh, given.placements) if sharded else None
            local = (given.to_local() if sharded else given).detach()
            setattr(module, name, nn.Parameter(distribute_tensor(local, mesh, placements)))
            register_parametrization(module, name, WholeParameter(tensor, **policy), unsafe=True)
