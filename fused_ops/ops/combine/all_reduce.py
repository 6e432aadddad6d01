"""fused_moe_combine_all_reduce: from tensors to a kernel, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined, why_not_combined
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ...dispatch import launch_cache
from ...dispatch.all_reduces import NotYet, choose_sum
from ...dispatch.choice import Choice, unfused
from ...dispatch.plan import ran
from ...dispatch.workspaces import ALL_REDUCE
from .. import all_reduce
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

OP = "fused_moe_combine_all_reduce"


class CombineAllReduceCall(NamedTuple):
    y: Tensor
    slots: Tensor
    weights: Tensor
    group_name: str
    shared: Tensor | None = None
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        given = [self.y, self.slots, self.weights]
        return given if self.shared is None else [*given, self.shared]


def _validate(call: CombineAllReduceCall) -> tuple[CombineAllReduceCall, ProcessGroup]:
    group = resolve_group(call.group_name)
    validate_combined(call)
    return call, group


def choose_combined_sum(combined: Combined, group: ProcessGroup) -> Choice:
    """The choice for an all-reduce of what is put together."""
    y, (tokens, hidden), shape = combined.y, combined.result_shape, combined.shape
    chosen = choose_sum(NotYet(y.device, y.dtype, tokens * hidden * y.element_size()), "sum", group)
    if chosen.algorithm != "push":
        return chosen
    if (reason := why_not_combined(tokens, hidden, y.dtype)) is not None:
        return replace(unfused(reason), programs=chosen.programs)  # those of the all-reduce by itself
    from ....kernels.all_reduce import cuda_kernel

    config, ranks, dtype = chosen.how.config, (group.size(), group.rank()), y.dtype

    def programs() -> list[Program]:
        return [cuda_kernel.launched_combine_all_reduce(ranks, dtype, shape)]

    def make(place: Any) -> Any:
        return cuda_kernel.combine_all_reduce_launcher(place, (tokens, hidden), dtype, shape, config)

    return replace(chosen, programs=programs, how=CombineHow((tokens, hidden, dtype, shape), make))


def fast_moe_combine_all_reduce(call: CombineAllReduceCall) -> Tensor | None:
    """As the op, if such a call was made before; else None, and nothing happened. Tensors may be anything."""
    results = launch_cache.launch_again(OP, None, call.tensors, call.group_name, (ALL_REDUCE,))
    return None if results is None else results[0]


def _run(choice: Choice, where: Heap | None, call: CombineAllReduceCall, group: ProcessGroup) -> Tensor:
    combined = combined_of(call)
    if where is not None and choice.algorithm == "push":
        return launch_combined(OP, choice, where, combined, combined.result_shape, None)
    total = combined.total()
    if choice.algorithm == "host":
        given = all_reduce.AllReduceCall(total, "sum", call.group_name)
        return all_reduce.run_by_choice(choice, where, given, group, op=OP)
    total = all_reduce.run_all_reduce(total, "sum", group, op=OP)
    ran(choice.plan_in(None))
    return total


class CombineAllReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: CombineAllReduceCall, y: Tensor, weights: Tensor, shared: Tensor | None
    ) -> Tensor:
        ctx.group_name, ctx.group_size = call.group_name, call.group_size
        save_combined(ctx, call, ctx.needs_input_grad[1:])
        done: Tensor = MOE_COMBINE_ALL_REDUCE.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(OP)
        total = torch.ops.weft.one_shot_all_reduce(grad, "sum", ctx.group_name, group_size=ctx.group_size)
        return None, *combined_gradients(ctx.saved_tensors, total, ctx.needs_input_grad[1:])


MOE_COMBINE_ALL_REDUCE = Op(
    "fused_moe_combine_all_reduce(Tensor y, Tensor slots, Tensor weights, str group_name, *, Tensor? shared=None,"
    " int? group_size=None) -> Tensor",
    record=CombineAllReduceCall,
    validate=_validate,
    fake=lambda call, group: call.y.new_empty(combined_of(call).result_shape),
    kernel="all_reduce",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=lambda call, group: choose_combined_sum(combined_of(call), group),
    run=_run,
    fast=fast_moe_combine_all_reduce,
    known_by=lambda call, group: (None, call.tensors),
    with_gradient=lambda call: CombineAllReduceFunction.apply(call, call.y, call.weights, call.shared),
    prepares=all_reduce.BOTH,
)
