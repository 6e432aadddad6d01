"""one_shot_all_to_all: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

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
from ...dispatch.launch_cache import launch_again
from ...dispatch.plan import ran
from ...dispatch.stand_alone import KINDS, StandAlone, choose_alone, run_alone
from ...dispatch.workspaces import ALL_REDUCE
from ..gradients import OneTensorFunction
from ..op import Op

if TYPE_CHECKING:
    from ....kernels.device.jit.program import Program


class AllToAllCall(NamedTuple):
    x: Tensor
    scatter_dim: int
    gather_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def dims(self) -> tuple[int, int]:
        return self.scatter_dim, self.gather_dim

    def shapes(self, world_size: int) -> tuple[list[int], list[int]]:
        """Those of a part and of the result; the dimensions are not negative."""
        return exchanged_shapes(self.x.shape, self.dims, world_size)


def exchanged_shapes(
    shape: Sequence[int], dims: tuple[int, int], world_size: int
) -> tuple[list[int], list[int]]:
    """Those of a part and of the result, by the dimensions that are scattered and gathered."""
    part, (scatter_dim, gather_dim) = list(shape), dims
    part[scatter_dim] = part[scatter_dim] // world_size
    result = part.copy()
    result[gather_dim] = result[gather_dim] * world_size
    return part, result


def _validate(call: AllToAllCall) -> tuple[AllToAllCall, ProcessGroup]:
    """The call with dimensions that are not negative, and the group."""
    group, x = resolve_group(call.group_name), call.x
    if x.dim() < 1:
        raise ValueError("x: has no dimension, must have 1 or more")
    if x.is_complex():
        raise TypeError(f"x: is {x.dtype}, must be of real numbers: torch.view_as_real(x)")
    scatter_dim = validation.checked_scatter_dim(call.scatter_dim, x, group.size())
    gather_dim = validation.checked_dim("gather_dim", call.gather_dim, "x", x.dim())
    return call._replace(scatter_dim=scatter_dim, gather_dim=gather_dim), group


def _choose(call: AllToAllCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    size = group.size()
    if call.x.device.type == "cpu":
        return on_host(exchange_layout(call.x.nbytes // size, size))
    return choose_exchange_on_cuda(_alone(call, size), group)


def choose_exchange_on_cuda(alone: StandAlone, group: ProcessGroup, kind: str = ALL_REDUCE) -> Choice:
    """In workspaces of a kind."""
    size, rank = group.size(), group.rank()

    def program() -> Program:
        from ....kernels.all_to_all.cuda_kernel import all_to_all_program

        return all_to_all_program(size, rank)

    # A rank sends and stores as many bytes as in an all-gather of its parts.
    return choose_alone(alone, size, program, kind=kind)


def _alone(call: AllToAllCall, size: int) -> StandAlone:
    return _alone_of(OP, call.x, call.x.shape, call.dims, size)


def _alone_of(op: str, x: Tensor, shape: Sequence[int], dims: tuple[int, int], size: int) -> StandAlone:
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
    choice = choose_exchange_on_cuda(_alone_of(op, like, shape, dims, size), group)
    return choice if choice.is_unfused else replace(choice, algorithm="one_shot", predicted_us=None)


def exchange_by_choice(
    choice: Choice, where: Heap, call: AllToAllCall, group: ProcessGroup, op: str
) -> Tensor:
    """The exchange of such a call."""
    if choice.algorithm == "one_shot":
        done = launch_again(op, call.dims, (call.x,), group.group_name, KINDS)
        if done is not None:
            return done[0]
        choice = replace(choice, known=(call.dims, (call.x,)))
        return run_alone(choice, where, _alone_of(op, call.x, call.x.shape, call.dims, group.size()))
    return run_all_to_all(choice, where, call, group, op)


def run_all_to_all(
    choice: Choice, where: Heap, call: AllToAllCall, group: ProcessGroup, op: str = OP
) -> Tensor:
    """As the op; the call is what validation returns. ``op``: whose call it is."""
    if choice.algorithm == "push":
        return run_alone(choice, where, _alone(call, where.world_size))
    x, size = call.x, group.size()
    part, result = call.shapes(size)
    parts = x.unflatten(call.scatter_dim, (size, part[call.scatter_dim])).movedim(call.scatter_dim, 0)
    sent = as_bytes(parts.contiguous()).view(size, -1) if x.numel() else parts.new_empty(size, 0)
    if choice.is_unfused:
        ran(choice.plan_in(None))
        received = reference_all_to_all(sent, group)
    else:
        received = exchange_parts(choice.begin_on(where), sent, op)
    joined = received.view(-1).view(x.dtype).view(size, *part).movedim(0, call.gather_dim)
    return joined.reshape(-1).view(result)


def _gradient(grad: Tensor, scatter_dim: int, gather_dim: int, name: str, size: int | None) -> Any:
    return torch.ops.weft.one_shot_all_to_all(grad, gather_dim, scatter_dim, name, group_size=size)


def _fake(call: AllToAllCall, group: ProcessGroup) -> Tensor:
    return call.x.new_empty(call.shapes(group.size())[1])


ALL_TO_ALL: Op = Op(
    "one_shot_all_to_all(Tensor x, int scatter_dim, int gather_dim, str group_name, *, int? group_size=None)"
    " -> Tensor",
    record=AllToAllCall,
    validate=_validate,
    fake=_fake,
    kernel="all_to_all",
    choose=_choose,
    run=run_all_to_all,
    known_by=lambda call: (call[1:3], [call.x]),
    kinds=KINDS,
    with_gradient=lambda call: OneTensorFunction.apply(ALL_TO_ALL, _gradient, call, call.x),
)
