"""fused_moe_combine_reduce_scatter: from tensors to a kernel, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import why_not_combined
from ....kernels.device.collective.rounds import rounds_layout
from ....kernels.reduce_scatter import configs, host
from ....kernels.reduce_scatter.reference import reference_reduce_scatter
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch import launch_cache
from ...dispatch.choice import Choice, on_host, unfused
from ...dispatch.plan import num_sms, ran
from ...dispatch.stand_alone import KINDS
from ...dispatch.workspaces import ALL_REDUCE
from .. import reduce_scatter
from ..op import Op, refuse_second_gradient
from .operands import (
    CombineHow,
    combined_gradients,
    combined_of,
    launch_combined,
    save_combined,
    validate_combined,
)

if TYPE_CHECKING:
    from ....kernels.device.jit.program import Program

OP = "fused_moe_combine_reduce_scatter"


class CombineReduceScatterCall(NamedTuple):
    y: Tensor
    slots: Tensor
    weights: Tensor
    scatter_dim: int
    group_name: str
    shared: Tensor | None = None
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        given = [self.y, self.slots, self.weights]
        return given if self.shared is None else [*given, self.shared]

    def part_shape(self, world_size: int) -> list[int]:
        """That of the result; ``scatter_dim`` is not negative."""
        shape = list(combined_of(self).result_shape)
        shape[self.scatter_dim] = shape[self.scatter_dim] // world_size
        return shape


def _validate(call: CombineReduceScatterCall) -> tuple[CombineReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group = resolve_group(call.group_name)
    validate_combined(call)
    dim = validation.checked_dim("scatter_dim", call.scatter_dim, "result", 2)
    size = combined_of(call).result_shape[dim]
    if size % group.size():
        raise ValueError(
            f"scatter_dim: what is scattered has size {size} there, must be a multiple of {group.size()} ranks"
        )
    return call._replace(scatter_dim=dim), group


def fast_moe_combine_reduce_scatter(call: CombineReduceScatterCall) -> Tensor | None:
    """As the op, if such a call was made before; else None, and nothing happened. All may be anything."""
    dim = call.scatter_dim % 2
    results = launch_cache.launch_again(OP, dim, call.tensors, call.group_name, KINDS)
    return None if results is None else results[0]


def _choose(call: CombineReduceScatterCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    combined, size, dim = combined_of(call), group.size(), call.scatter_dim
    y, (tokens, hidden), shape = call.y, combined.result_shape, combined.shape
    nbytes = tokens * hidden * y.element_size() // size
    if y.device.type == "cpu":
        return on_host(host.host_reduce_scatter_layout(nbytes, size))
    from ....kernels.device.collective.launch import MOST_BYTES
    from ....kernels.reduce_scatter import cuda_kernel

    part = hidden // size if dim else hidden
    if (reason := why_not_combined(tokens, part, y.dtype)) is not None:
        return unfused(reason)
    if nbytes > MOST_BYTES:
        return unfused(f"a part has {nbytes} bytes, more than the {MOST_BYTES} that the kernels take")
    config, ranks, dtype = (
        configs.choose_reduce_scatter(size, num_sms(y.device)),
        (size, group.rank()),
        y.dtype,
    )
    sizes = tokens, hidden, dim

    def programs() -> list[Program]:
        return [cuda_kernel.launched_combine_reduce_scatter(ranks, dtype, shape)]

    def make(place: Any) -> Any:
        return cuda_kernel.combine_reduce_scatter_launcher(place, sizes, dtype, shape, config)

    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=rounds_layout(cuda_kernel.scatter_problem(sizes, dtype, size).vectors, size, config),
        predicted_us=configs.estimate_reduce_scatter_us(nbytes, size),
        programs=programs,
        how=CombineHow((*sizes, dtype, shape), make),
    )


def _run(choice: Choice, where: Heap | None, call: CombineReduceScatterCall, group: ProcessGroup) -> Tensor:
    combined, dim = combined_of(call), call.scatter_dim
    if where is not None and choice.algorithm == "push":
        return launch_combined(OP, choice, where, combined, call.part_shape(group.size()), dim)
    total = combined.total()
    if where is None or choice.is_unfused:
        ran(choice.plan_in(None))
        return reference_reduce_scatter(total, "sum", dim, group)
    given = reduce_scatter.ReduceScatterCall(total, "sum", dim, call.group_name)
    return reduce_scatter.on_cpu(choice, where, given, OP)


class CombineReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: CombineReduceScatterCall, y: Tensor, weights: Tensor, shared: Tensor | None
    ) -> Tensor:
        ctx.scatter_dim, ctx.group_name, ctx.group_size = call.scatter_dim, call.group_name, call.group_size
        save_combined(ctx, call, ctx.needs_input_grad[1:])
        done: Tensor = MOE_COMBINE_REDUCE_SCATTER.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(OP)
        args = grad, ctx.scatter_dim, ctx.group_name
        whole = torch.ops.weft.one_shot_all_gather(*args, group_size=ctx.group_size)
        return None, *combined_gradients(ctx.saved_tensors, whole, ctx.needs_input_grad[1:])


MOE_COMBINE_REDUCE_SCATTER = Op(
    "fused_moe_combine_reduce_scatter(Tensor y, Tensor slots, Tensor weights, int scatter_dim, str group_name, *,"
    " Tensor? shared=None, int? group_size=None) -> Tensor",
    record=CombineReduceScatterCall,
    validate=_validate,
    fake=lambda call, group: call.y.new_empty(call.part_shape(group.size())),
    kernel="reduce_scatter",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=_choose,
    run=_run,
    fast=fast_moe_combine_reduce_scatter,
    known_by=lambda call, group: (call.scatter_dim, call.tensors),
    with_gradient=lambda call: CombineReduceScatterFunction.apply(call, call.y, call.weights, call.shared),
)
