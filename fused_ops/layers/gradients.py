"""Gradients that are parts of a sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...symm_mem import Group
from .. import validation
from ..functional import one_shot_all_reduce_


def all_reduce_gradients(parameters: Iterable[Tensor], group: Group = None) -> None:
    """Sum over the ranks the gradients of parameters which each rank has used for its own part of the sequence.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import all_reduce_gradients
    >>> norm = torch.nn.LayerNorm(8)  # the same on every rank
    >>> norm(torch.randn(4, 8)).sum().backward()  # of this rank's part of the sequence
    >>> all_reduce_gradients(norm.parameters(), None)  # once a step, before optimizer.step()
    >>> norm.bias.grad.tolist() == [4.0 * dist.get_world_size()] * 8
    True

    With sequence parallelism these are the parameters between the parallel layers: norms, a router, a position
    embedding. Without the sum each rank's optimizer takes another step, and the copies drift apart. Parameters of
    ColumnParallelLinear and RowParallelLinear do not belong here: their gradients are whole already.

    One all-reduce for each dtype, of all gradients in one flat tensor. Call it once a step: with gradient accumulation
    after the last backward, since a gradient that is summed twice counts twice.

    Args:
        parameters: the same ones in the same order on every rank. Those that require no gradient are left out; one that
            has none counts as zeros, and gets the others' sum.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Raises:
        TypeError, ValueError: a gradient is a DTensor, sparse, or not of float32, bfloat16 or float16.
        PeerTimeout: a rank did not come.
    """
    gradients = []
    for i, p in enumerate(validation.tensors("parameters", parameters)):
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            validation.tensor(f"parameters[{i}].grad", p.grad)
            validation.float_dtype(f"parameters[{i}].grad", p.grad)
            gradients.append(p.grad)
    for dtype in validation.DTYPES:
        if alike := [g for g in gradients if g.dtype == dtype]:
            flat = torch.cat([g.detach().reshape(-1) for g in alike])
            one_shot_all_reduce_(flat, "sum", group)
            for g, total in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
                g.detach().copy_(total.view(g.shape))
