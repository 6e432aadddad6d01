"""fused_moe_combine_all_reduce: from tensors to a kernel, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined, why_not_combined
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ...dispatch.all_reduces import NotYet, choose_sum
from ...dispatch.choice import Choice, KernelOf, Known, launch_push, unfused
from ...dispatch.stand_alone import KINDS
from .. import all_reduce
from ..op import Op
from .combined import CombineFunction, Reduction, combined_of, validate_combined, wanted_sum

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
    def reduction(self) -> Reduction:
        return Reduction("sum", None, self.group_name, self.group_size)


def _validate(call: CombineAllReduceCall) -> tuple[CombineAllReduceCall, ProcessGroup]:
    group = resolve_group(call.group_name)
    validate_combined(combined_of(call))
    return call, group


def choose_combined_sum(combined: Combined, reduce_op: str, group: ProcessGroup) -> Choice:
    """The choice for an all-reduce of what is put together."""
    y, (tokens, hidden) = combined.y, combined.result_shape
    nbytes = tokens * hidden * y.element_size()
    chosen = choose_sum(NotYet(y.device, y.dtype, nbytes), reduce_op, group)
    if chosen.algorithm != "push":
        return chosen
    if (reason := why_not_combined(tokens, hidden, y.dtype)) is not None:
        return replace(unfused(reason), programs=chosen.programs)  # those of the all-reduce by itself
    from ....kernels.all_reduce import cuda_kernel

    config, wanted = chosen.how.config, wanted_sum(combined, reduce_op)

    def programs() -> list[Program]:
        return [cuda_kernel.all_reduce_program(group.size(), group.rank(), *wanted.defined)]

    def make(place: Any) -> Any:
        return cuda_kernel.combine_all_reduce_launcher(place, wanted, config)

    return replace(chosen, programs=programs, how=KernelOf(wanted, make))


def sum_combined(
    choice: Choice, where: Heap | None, combined: Combined, reduce_op: str, group: ProcessGroup, op: str
) -> Tensor:
    """By such a choice. ``op``: whose call it is."""
    if where is not None and choice.algorithm == "push":
        return launch_push(op, choice, where, combined.tensors, [(combined.result_shape, None)])[0]
    return all_reduce.sum_without_kernel(choice, where, combined.total(), reduce_op, group, op)


def _known_by(call: CombineAllReduceCall) -> Known:
    given, shared = (call.y, call.slots, call.weights), call.shared
    return "sum", given if shared is None else (*given, shared)


MOE_COMBINE_ALL_REDUCE: Op = Op(
    "fused_moe_combine_all_reduce(Tensor y, Tensor slots, Tensor weights, str group_name, *, Tensor? shared=None,"
    " int? group_size=None) -> Tensor",
    record=CombineAllReduceCall,
    validate=_validate,
    fake=lambda call, group: call.y.new_empty(combined_of(call).result_shape),
    kernel="all_reduce",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=lambda call, group: choose_combined_sum(combined_of(call), "sum", group),
    run=lambda choice, where, call, group: sum_combined(choice, where, combined_of(call), "sum", group, OP),
    known_by=_known_by,
    kinds=KINDS,
    with_gradient=lambda call: CombineFunction.apply(
        MOE_COMBINE_ALL_REDUCE, call, call.y, call.weights, call.shared
    ),
)
