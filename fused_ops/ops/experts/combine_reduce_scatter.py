"""fused_moe_combine_reduce_scatter: from tensors to a kernel, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined, why_not_combined
from ....kernels.device.collective.host_exchange import exchange_layout
from ....kernels.device.collective.rounds import choose_rounds, rounds_layout
from ....kernels.device.comm.exchange_time import estimate_reduce_scatter_us
from ....kernels.reduce_scatter.reference import reference_reduce_scatter
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice, KernelOf, Known, launch_push, on_host, unfused
from ...dispatch.plan import num_sms, ran
from ...dispatch.stand_alone import KINDS
from ...dispatch.workspaces import ALL_REDUCE
from .. import reduce_scatter
from ..op import Op
from .combined import CombineFunction, Reduction, combined_of, validate_combined, wanted_sum

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
    def reduction(self) -> Reduction:
        return Reduction("sum", self.scatter_dim, self.group_name, self.group_size)


def part_shape(combined: Combined, dim: int, world_size: int) -> list[int]:
    """That of the result; ``dim`` is not negative."""
    shape = list(combined.result_shape)
    shape[dim] = shape[dim] // world_size
    return shape


def _validate(call: CombineReduceScatterCall) -> tuple[CombineReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group = resolve_group(call.group_name)
    validate_combined(combined_of(call))
    return call._replace(scatter_dim=validated_dim(call.scatter_dim, combined_of(call), group)), group


def validated_dim(scatter_dim: int, combined: Combined, group: ProcessGroup) -> int:
    """The dimension that is scattered, not negative."""
    dim = validation.checked_dim("scatter_dim", scatter_dim, "result", 2)
    size = combined.result_shape[dim]
    if size % group.size():
        raise ValueError(
            f"scatter_dim: what is scattered has size {size} there, must be a multiple of {group.size()} ranks"
        )
    return dim


def choose_combined_part(combined: Combined, reduce_op: str, dim: int, group: ProcessGroup) -> Choice:
    """The choice for a reduce-scatter of what is put together; ``dim`` is not negative."""
    y, (tokens, hidden), size = combined.y, combined.result_shape, group.size()
    nbytes = tokens * hidden * y.element_size() // size
    if y.device.type == "cpu":
        return on_host(exchange_layout(nbytes, size))
    from ....kernels.device.collective.launch import MOST_BYTES
    from ....kernels.reduce_scatter import cuda_kernel

    part = hidden // size if dim else hidden
    if (reason := why_not_combined(tokens, part, y.dtype)) is not None:

        def alone() -> list[Program]:
            return [cuda_kernel.reduce_scatter_program(size, group.rank(), y.dtype, reduce_op)]

        return replace(unfused(reason), programs=alone)  # that of the reduce-scatter by itself
    if nbytes > MOST_BYTES:
        return unfused(f"a part has {nbytes} bytes, more than the {MOST_BYTES} that the kernels take")
    config = choose_rounds(size, num_sms(y.device), exact=False)
    wanted = wanted_sum(combined, reduce_op)

    def programs() -> list[Program]:
        return [cuda_kernel.reduce_scatter_program(size, group.rank(), *wanted.defined)]

    def make(place: Any) -> Any:
        return cuda_kernel.combine_reduce_scatter_launcher(place, wanted, dim, config)

    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=rounds_layout(cuda_kernel.scatter_problem(wanted, dim, size).vectors, size, config),
        predicted_us=estimate_reduce_scatter_us(nbytes, size),
        programs=programs,
        how=KernelOf((wanted, dim), make),
    )


def part_of_combined(
    choice: Choice, where: Heap | None, combined: Combined, how: tuple[str, int], group: ProcessGroup, op: str
) -> Tensor:
    """By such a choice. ``how``: the operation, and a dimension that is not negative; ``op``: whose call it is."""
    reduce_op, dim = how
    if where is not None and choice.algorithm == "push":
        shape = part_shape(combined, dim, group.size())
        return launch_push(op, choice, where, combined.tensors, [(shape, None)])[0]
    call = reduce_scatter.ReduceScatterCall(combined.total(), reduce_op, dim, group.group_name)
    if where is None:
        part = reference_reduce_scatter(call.x, reduce_op, dim, group)
    elif choice.algorithm == "host":
        return reduce_scatter.on_cpu(choice, where, call, op)
    else:  # the bits of the all-reduce, whatever is put together by a kernel
        alone = reduce_scatter.choose_part(call, group)
        part = reduce_scatter.run_reduce_scatter(alone, where, call, group)
    ran(choice.plan_in(None))
    return part


def _run(choice: Choice, where: Heap | None, call: CombineReduceScatterCall, group: ProcessGroup) -> Tensor:
    return part_of_combined(choice, where, combined_of(call), ("sum", call.scatter_dim), group, OP)


def _known_by(call: CombineReduceScatterCall) -> Known:
    given, shared = (call.y, call.slots, call.weights), call.shared
    return call.scatter_dim, given if shared is None else (*given, shared)


MOE_COMBINE_REDUCE_SCATTER: Op = Op(
    "fused_moe_combine_reduce_scatter(Tensor y, Tensor slots, Tensor weights, int scatter_dim, str group_name, *,"
    " Tensor? shared=None, int? group_size=None) -> Tensor",
    record=CombineReduceScatterCall,
    validate=_validate,
    fake=lambda call, group: call.y.new_empty(part_shape(combined_of(call), call.scatter_dim, group.size())),
    kernel="reduce_scatter",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=lambda call, group: choose_combined_part(combined_of(call), "sum", call.scatter_dim, group),
    run=_run,
    known_by=_known_by,
    kinds=KINDS,
    with_gradient=lambda call: CombineFunction.apply(
        MOE_COMBINE_REDUCE_SCATTER, call, call.y, call.weights, call.shared
    ),
)
