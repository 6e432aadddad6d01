"""fused_moe_combine_all_reduce and fused_moe_combine_reduce_scatter, and of all sums of experts' outputs what is put
together and refused, how it is reduced, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined, CombinedSum, why_not_combined
from ....kernels.device.collective.host_exchange import exchange_layout
from ....kernels.device.collective.rounds import choose_rounds, rounds_layout
from ....kernels.device.comm.exchange_time import estimate_reduce_scatter_us
from ....symm_mem import resolve_group
from ... import validation
from ...dispatch.all_reduces import NotYet, choose_sum
from ...dispatch.choice import Choice, KernelOf, Known, launch_push, on_host, unfused
from ...dispatch.plan import num_sms, ran
from ...dispatch.stand_alone import KINDS
from ...dispatch.workspaces import ALL_REDUCE
from .. import all_reduce, reduce_scatter
from ..gradients import refuse_second_gradient
from ..op import Op

_ops = torch.ops.weft


class Reduction(NamedTuple):
    """What ends an op. ``scatter_dim``: of an all-reduce None, of a call that is validated not negative."""

    reduce_op: str
    scatter_dim: int | None
    group_name: str
    group_size: int | None

    def checked(self, call: Any, combined: Combined, group: ProcessGroup) -> Any:
        """The call with a dimension that is not negative, if it has one."""
        if self.scatter_dim is None:
            return call
        dim = validation.checked_dim("scatter_dim", self.scatter_dim, "result", 2)
        if (size := combined.result_shape[dim]) % group.size():
            raise ValueError(
                f"scatter_dim: what is scattered has size {size} there, must be a multiple of {group.size()} ranks"
            )
        return call._replace(scatter_dim=dim)

    def result_shape(self, combined: Combined, world_size: int) -> list[int]:
        shape, dim = list(combined.result_shape), self.scatter_dim
        if dim is not None:
            shape[dim] = shape[dim] // world_size
        return shape

    def gradient(self, grad: Tensor) -> Tensor:
        """That of what each rank gives, of those of all ranks' results."""
        name, size = self.group_name, self.group_size
        if self.scatter_dim is None:
            found: Tensor = _ops.one_shot_all_reduce(grad, self.reduce_op, name, group_size=size)
        else:
            grad = grad / resolve_group(name).size() if self.reduce_op == "avg" else grad
            found = _ops.one_shot_all_gather(grad, self.scatter_dim, name, group_size=size)
        return found


def combined_of(call: Any) -> Combined:
    return Combined(call.y, call.slots, call.weights, call.shared)


def how_reduced(call: Any) -> Reduction:
    """Of a call that does not say it a sum, for all ranks."""
    reduce_op, dim = getattr(call, "reduce_op", "sum"), getattr(call, "scatter_dim", None)
    return Reduction(reduce_op, dim, call.group_name, call.group_size)


def validate_combined(combined: Combined, like_name: str = "y") -> None:
    """``like_name``: the argument that has the dtype and the device of y."""
    y, slots, weights, shared = combined
    for name, tensor in (("y", y), ("slots", slots)):
        validation.dimensions(name, tensor, 2)
    validation.float_dtype("y", y)
    if slots.dtype != torch.int32:
        raise TypeError(f"slots: is {slots.dtype}, must be torch.int32")
    if slots.shape[1] == 0:
        raise ValueError(f"slots: has shape {tuple(slots.shape)}, must have a column for each choice")
    validation.must_have_shape("weights", weights, slots.shape, " like slots")
    if weights.dtype != torch.float32:
        validation.dtype_like("weights", weights, y, like_name, " or torch.float32" * (y.dtype.itemsize == 2))
    for name, tensor in (("slots", slots), ("weights", weights)):
        validation.same_device(name, tensor, y, like_name)
    if shared is not None:
        shape = slots.shape[0], y.shape[1]
        validation.must_have_shape("shared", shared, shape, ": a row of the sum for each token")
        validation.like_tensor("shared", shared, y, like_name)


def save_combined(ctx: Any, call: Any, wanted: Sequence[bool], *more: Tensor | None) -> None:
    """What ``Combined.gradients`` needs, of those of y, weights and shared that are wanted."""
    y = call.y if wanted[1] else call.y.new_empty(()).expand(call.y.shape)
    ctx.save_for_backward(y, call.slots, call.weights, *more)


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

    config, size, rank = chosen.how, group.size(), group.rank()
    return replace(
        chosen,
        programs=lambda: [cuda_kernel.all_reduce_program(size, rank, *wanted.defined)],
        how=KernelOf(wanted, lambda place: cuda_kernel.combine_all_reduce_launcher(place, wanted, config)),
    )


def _choose_part(combined: Combined, wanted: CombinedSum, dim: int, group: ProcessGroup) -> Choice:
    y, (tokens, hidden, dtype, _, reduce_op), size = combined.y, wanted, group.size()
    nbytes = tokens * hidden * dtype.itemsize // size
    if y.device.type == "cpu":
        return on_host(exchange_layout(nbytes, size))
    from ....kernels.device.collective.launch import MOST_BYTES
    from ....kernels.reduce_scatter import cuda_kernel

    part, program = hidden // size if dim else hidden, cuda_kernel.reduce_scatter_program
    if (reason := why_not_combined(tokens, part, dtype)) is not None:  # the program is that of it by itself
        return replace(unfused(reason), programs=lambda: [program(size, group.rank(), dtype, reduce_op)])
    if nbytes > MOST_BYTES:
        return unfused(f"a part has {nbytes} bytes, more than the {MOST_BYTES} that the kernels take")
    config = choose_rounds(size, num_sms(y.device), exact=False)
    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=rounds_layout(cuda_kernel.scatter_problem(wanted, dim, size).vectors, size, config),
        predicted_us=estimate_reduce_scatter_us(nbytes, size),
        programs=lambda: [program(size, group.rank(), *wanted.defined)],
        how=KernelOf(
            (wanted, dim),
            lambda place: cuda_kernel.combine_reduce_scatter_launcher(place, wanted, dim, config),
        ),
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
    ran(choice.plan_of())
    return part


class CombineFunction(torch.autograd.Function):
    """An op's call, of which there is a ``Reduction``."""

    @staticmethod
    def forward(ctx: Any, op: Op, call: Any, y: Tensor, weights: Tensor, shared: Tensor | None) -> Any:
        ctx.op, ctx.reduction = op.name, how_reduced(call)
        save_combined(ctx, call, ctx.needs_input_grad[2:])
        return op.run_below_autograd(call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(ctx.op)
        whole = ctx.reduction.gradient(grad)
        return None, None, *Combined(*ctx.saved_tensors).gradients(whole, ctx.needs_input_grad[2:])


def _validate(call: Any) -> tuple[Any, ProcessGroup]:
    """The call with a dimension that is not negative, if it has one, and the group."""
    group, combined = resolve_group(call.group_name), combined_of(call)
    validate_combined(combined)
    return how_reduced(call).checked(call, combined, group), group


def _known_by(call: Any) -> Known:
    given, shared = call[:3], call.shared
    return how_reduced(call).scatter_dim, given if shared is None else (*given, shared)


def _op(schema: str, kernel: str) -> Op:
    op: Op = Op(
        schema,
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
    "all_reduce",
)
MOE_COMBINE_REDUCE_SCATTER = _op(
    "fused_moe_combine_reduce_scatter(Tensor y, Tensor slots, Tensor weights, int scatter_dim, str group_name, *,"
    " Tensor? shared=None, int? group_size=None) -> Tensor",
    "reduce_scatter",
)
