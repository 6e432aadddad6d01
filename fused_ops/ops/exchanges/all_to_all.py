"""one_shot_all_to_all: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather.reference import as_bytes
from ....kernels.all_to_all import OP
from ....kernels.all_to_all.reference import reference_all_to_all
from ....kernels.device.collective.host_exchange import exchange_layout, exchange_parts
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice, on_host
from ...dispatch.plan import ran
from ...dispatch.stand_alone import KINDS, StandAlone, choose_alone, run_alone, run_beside
from ..gradients import OneTensorFunction
from ..op import Op


class AllToAllCall(NamedTuple):
    x: Tensor
    scatter_dim: int
    gather_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def dims(self) -> tuple[int, int]:
        return self.scatter_dim, self.gather_dim


def exchanged_shapes(shape: Sequence[int], dims: tuple[int, int], size: int) -> tuple[list[int], list[int]]:
    """Those of a part and of the result, by the dimensions that are scattered and gathered."""
    part, (scatter_dim, gather_dim) = list(shape), dims
    part[scatter_dim] = part[scatter_dim] // size
    result = part.copy()
    result[gather_dim] = result[gather_dim] * size
    return part, result


def _validate(call: AllToAllCall) -> tuple[AllToAllCall, ProcessGroup]:
    """The call with dimensions that are not negative, and the group."""
    group, x = resolve_group(call.group_name), call.x
    validation.has_dimensions("x", x)
    validation.real("x", x)
    scatter_dim = validation.checked_scatter_dim(call.scatter_dim, x, group.size())
    gather_dim = validation.checked_dim("gather_dim", call.gather_dim, "x", x.dim())
    return call._replace(scatter_dim=scatter_dim, gather_dim=gather_dim), group


def _choose(call: AllToAllCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    size = group.size()
    if call.x.device.type == "cpu":
        return on_host(exchange_layout(call.x.nbytes // size, size))
    return choose_alone(_alone(OP, call.x, call.x.shape, call.dims, size), group)


def _alone(op: str, x: Tensor, shape: Sequence[int], dims: tuple[int, int], size: int) -> StandAlone:
    part, result = exchanged_shapes(shape, dims, size)
    return StandAlone(op, op, [x], result, part, *dims)


def choose_exchange_beside(
    op: str, like: Tensor, shape: Sequence[int], dims: tuple[int, int], group: ProcessGroup
) -> Choice:
    """Of the exchange of a tensor of such a shape, as a part of a call of another op, next to a product of cuBLAS.
    ``like``: one of its dtype and on its device."""
    size = group.size()
    if like.device.type == "cpu":
        return on_host(exchange_layout(prod(shape) * like.element_size() // size, size))
    choice = choose_alone(_alone(op, like, shape, dims, size), group)
    return choice if choice.is_unfused else replace(choice, algorithm="one_shot", predicted_us=None)


def run_all_to_all(
    choice: Choice, where: Heap, call: AllToAllCall, group: ProcessGroup, op: str = OP
) -> Tensor:
    """As the op, or as a part of a call of ``op``; the call is what validation returns."""
    x, size = call.x, group.size()
    alone = _alone(op, x, x.shape, call.dims, size)
    if choice.algorithm == "push":
        return run_alone(choice, where, alone)
    if choice.algorithm == "one_shot":
        return run_beside(choice, where, alone, call.dims)
    part, result = exchanged_shapes(x.shape, call.dims, size)
    parts = x.unflatten(call.scatter_dim, (size, part[call.scatter_dim])).movedim(call.scatter_dim, 0)
    sent = as_bytes(parts.contiguous()).view(size, -1) if x.numel() else parts.new_empty(size, 0)
    if choice.is_unfused:
        ran(choice.plan_of())
        received = reference_all_to_all(sent, group)
    else:
        received = exchange_parts(choice.begin_on(where), sent, op)
    joined = received.view(-1).view(x.dtype).view(size, *part).movedim(0, call.gather_dim)
    return joined.reshape(-1).view(result)


def _gradient(grad: Tensor, scatter_dim: int, gather_dim: int, name: str, size: int | None) -> Any:
    return torch.ops.weft.one_shot_all_to_all(grad, gather_dim, scatter_dim, name, group_size=size)


ALL_TO_ALL: Op = Op(
    "one_shot_all_to_all(Tensor x, int scatter_dim, int gather_dim, str group_name, *, int? group_size=None)"
    " -> Tensor",
    record=AllToAllCall,
    validate=_validate,
    fake=lambda call, group: call.x.new_empty(exchanged_shapes(call.x.shape, call.dims, group.size())[1]),
    kernel="all_to_all",
    choose=_choose,
    run=run_all_to_all,
    known_by=lambda call: (call[1:3], [call.x]),
    kinds=KINDS,
    with_gradient=lambda call: OneTensorFunction.apply(ALL_TO_ALL, _gradient, call, call.x),
)
