"""fused_moe_combine_all_reduce and fused_moe_combine_reduce_scatter, and how all sums of experts' outputs are reduced:
from tensors to a kernel, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined, CombinedSum, why_not_combined
from ....kernels.device.collective.host_exchange import exchange_layout
from ....kernels.device.collective.rounds import choose_rounds, rounds_layout
from ....kernels.device.comm.exchange_time import estimate_reduce_scatter_us
from ....symm_mem import resolve_group
from ...dispatch.all_reduces import NotYet, choose_sum
from ...dispatch.choice import Choice, KernelOf, Known, launch_push, on_host, unfused
from ...dispatch.plan import num_sms, ran
from ...dispatch.stand_alone import KINDS
from ...dispatch.workspaces import ALL_REDUCE
from .. import all_reduce, reduce_scatter
from ..op import Op
from .combined import CombineFunction, Reduction, combined_of, how_reduced, validate_combined

if TYPE_CHECKING:
    from ....kernels.device.jit.program import Program


class CombineAllReduceCall(NamedTuple):
    y: Tensor
    slots: Tensor
    weights: Tensor
    group_name: str
    shared: Tensor | None = None
    group_size: int | None = None


class CombineReduceScatterCall(NamedTuple):
    y: Tensor
    slots: Tensor
    weights: Tensor
    scatter_dim: int
    group_name: str
    shared: Tensor | None = None
    group_size: int | None = None


def choose_combined(combined: Combined, how: Reduction, group: ProcessGroup) -> Choice:
    """The choice for a reduction of what is put together."""
    wanted = CombinedSum(*combined.result_shape, combined.y.dtype, combined.shape, how.reduce_op)
    if how.scatter_dim is None:
        return _choose_sum(combined, wanted, group)
    return _choose_part(combined, wanted, how.scatter_dim, group)


def _choose_sum(combined: Combined, wanted: CombinedSum, group: ProcessGroup) -> Choice:
    y, (tokens, hidden, dtype, _, reduce_op) = combined.y, wanted
    chosen = choose_sum(NotYet(y.device, dtype, tokens * hidden * dtype.itemsize), reduce_op, group)
    if chosen.algorithm != "push":
        return chosen
    if (reason := why_not_combined(tokens, hidden, dtype)) is not None:
        return replace(unfused(reason), programs=chosen.programs)  # those of the all-reduce by itself
    from ....kernels.all_reduce import cuda_kernel

    config = chosen.how.config

    def programs() -> list[Program]:
        return [cuda_kernel.all_reduce_program(group.size(), group.rank(), *wanted.defined)]

    def make(place: Any) -> Any:
        return cuda_kernel.combine_all_reduce_launcher(place, wanted, config)

    return replace(chosen, programs=programs, how=KernelOf(wanted, make))


def _choose_part(combined: Combined, wanted: CombinedSum, dim: int, group: ProcessGroup) -> Choice:
    y, (tokens, hidden, dtype, _, reduce_op), size = combined.y, wanted, group.size()
    nbytes = tokens * hidden * dtype.itemsize // size
    if y.device.type == "cpu":
        return on_host(exchange_layout(nbytes, size))
    from ....kernels.device.collective.launch import MOST_BYTES
    from ....kernels.reduce_scatter import cuda_kernel

    part = hidden // size if dim else hidden
    if (reason := why_not_combined(tokens, part, dtype)) is not None:

        def alone() -> list[Program]:
            return [cuda_kernel.reduce_scatter_program(size, group.rank(), dtype, reduce_op)]

        return replace(unfused(reason), programs=alone)  # that of the reduce-scatter by itself
    if nbytes > MOST_BYTES:
        return unfused(f"a part has {nbytes} bytes, more than the {MOST_BYTES} that the kernels take")
    config = choose_rounds(size, num_sms(y.device), exact=False)

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


def reduce_combined(
    choice: Choice, where: Any, combined: Combined, how: Reduction, group: ProcessGroup, op: str
) -> Tensor:
    """By such a choice, on a heap if that is not unfused. ``op``: whose call it is."""
    if where is not None and choice.algorithm == "push":
        shape = how.result_shape(combined, group.size())
        return launch_push(op, choice, where, combined.tensors, [(shape, None)])[0]
    x, reduce_op, dim = combined.total(), how.reduce_op, how.scatter_dim
    if dim is None:
        return all_reduce.sum_without_kernel(choice, where, x, reduce_op, group, op)
    call = reduce_scatter.ReduceScatterCall(x, reduce_op, dim, group.group_name)
    if where is None or choice.algorithm == "host":
        return reduce_scatter.run_reduce_scatter(choice, where, call, group, op=op)
    # The bits of the all-reduce, whatever is put together by a kernel.
    part = reduce_scatter.run_reduce_scatter(reduce_scatter.choose_part(call, group), where, call, group)
    ran(choice.plan_in(None))
    return part


def _validate(call: Any) -> tuple[Any, ProcessGroup]:
    """The call with a dimension that is not negative, if it has one, and the group."""
    group, combined = resolve_group(call.group_name), combined_of(call)
    validate_combined(combined)
    return how_reduced(call).checked(call, combined, group), group


def _known_by(call: Any) -> Known:
    given, shared = call[:3], call.shared
    return how_reduced(call).scatter_dim, given if shared is None else (*given, shared)


def _op(schema: str, record: Callable[..., Any], kernel: str) -> Op:
    op = Op(
        schema,
        record=record,
        validate=_validate,
        fake=lambda call, group: call.y.new_empty(
            how_reduced(call).result_shape(combined_of(call), group.size())
        ),
        kernel=kernel,
        sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
        choose=lambda call, group: choose_combined(combined_of(call), how_reduced(call), group),
        run=lambda choice, where, call, group: reduce_combined(
            choice, where, combined_of(call), how_reduced(call), group, op.name
        ),
        known_by=_known_by,
        kinds=KINDS,
        with_gradient=lambda call: CombineFunction.apply(op, call, call.y, call.weights, call.shared),
    )
    return op


MOE_COMBINE_ALL_REDUCE = _op(
    "fused_moe_combine_all_reduce(Tensor y, Tensor slots, Tensor weights, str group_name, *, Tensor? shared=None,"
    " int? group_size=None) -> Tensor",
    CombineAllReduceCall,
    "all_reduce",
)
MOE_COMBINE_REDUCE_SCATTER = _op(
    "fused_moe_combine_reduce_scatter(Tensor y, Tensor slots, Tensor weights, int scatter_dim, str group_name, *,"
    " Tensor? shared=None, int? group_size=None) -> Tensor",
    CombineReduceScatterCall,
    "reduce_scatter",
)
