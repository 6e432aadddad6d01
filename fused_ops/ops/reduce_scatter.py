"""one_shot_reduce_scatter: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.collective.host_exchange import exchange_layout, reduce_scatter_parts
from ...kernels.reduce_scatter import INTO, OP
from ...kernels.reduce_scatter.reference import reference_reduce_scatter, reference_reduce_scatter_uneven
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.choice import Choice, on_host, unfused
from ..dispatch.plan import ran
from ..dispatch.stand_alone import KINDS, StandAlone, choose_alone, run_alone
from . import gradients
from .all_gather import UNEVEN, known_with_counts, with_dim_in_front
from .op import Op, writing_out


class ReduceScatterCall(NamedTuple):
    x: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    group_size: int | None = None
    counts: Sequence[int] | None = None
    group_rank: int | None = None

    def part_shape(self, world_size: int, rank: int) -> list[int]:
        """That of the result; ``scatter_dim`` is not negative."""
        shape, counts = list(self.x.shape), self.counts
        dim = self.scatter_dim
        shape[dim] = shape[dim] // world_size if counts is None else counts[rank]
        return shape

    @property
    def parts(self) -> list[Tensor]:
        """One for each rank, flat."""
        assert self.counts is not None
        rows = self.x.movedim(self.scatter_dim, 0)
        return [part.reshape(-1) for part in rows.split([*self.counts])]


def _validate(call: ReduceScatterCall) -> tuple[ReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group, x = resolve_group(call.group_name), call.x
    validation.has_dimensions("x", x)
    validation.float_dtype("x", x)
    validation.reduction(call.reduce_op, validation.ALL_REDUCE_OPS)
    if call.counts is None:
        dim = validation.checked_scatter_dim(call.scatter_dim, x, group.size())
    else:
        dim = validation.checked_dim("scatter_dim", call.scatter_dim, "x", x.dim())
        validation.counts_of_ranks(call.counts, call.group_rank, group)
        if (total := sum(call.counts)) != x.shape[dim]:
            raise ValueError(
                f"counts: add up to {total}, must add up to {x.shape[dim]}, the size of x in dimension {dim}"
            )
    return call._replace(scatter_dim=dim), group


def choose_part(call: ReduceScatterCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    size = group.size()
    if call.x.device.type == "cpu":
        nbytes, counts = call.x.nbytes, call.counts
        part = nbytes // size if counts is None else nbytes // sum(counts) * max(counts)
        return on_host(exchange_layout(part, size))
    if call.counts is not None and len(set(call.counts)) > 1:
        return unfused(UNEVEN)
    return choose_alone(_alone(call, None, size), group)


def _alone(call: ReduceScatterCall, out: Tensor | None, size: int) -> StandAlone:
    given, op = ([call.x], OP) if out is None else ([out, call.x], INTO)
    dim, part = call.scatter_dim, call.part_shape(size, 0)
    return StandAlone(OP, op, given, part, part, scatter_dim=dim, reduce_op=call.reduce_op)


def run_reduce_scatter(
    choice: Choice,
    where: Heap,
    call: ReduceScatterCall,
    group: ProcessGroup,
    out: Tensor | None = None,
    op: str = OP,
) -> Tensor:
    """As the op, or as a part of a call of ``op``; the call is what validation returns. ``out``: what the result is
    written to, and then returned; of its shape, with any strides."""
    if choice.is_unfused:
        ran(choice.plan_of())
        if call.counts is None:
            done = reference_reduce_scatter(call.x, call.reduce_op, call.scatter_dim, group)
        else:
            part = reference_reduce_scatter_uneven(call.parts, call.reduce_op, group)
            done = with_dim_in_front(part, call.scatter_dim, call.part_shape(0, group.rank()))
    elif choice.algorithm == "host":
        done = _on_cpu(choice, where, call, op if out is None else INTO)
    else:
        done = run_alone(choice, where, _alone(call, out, where.world_size))
    return done if out is None or out is done else out.copy_(done)


def _on_cpu(choice: Choice, where: Heap, call: ReduceScatterCall, op: str) -> Tensor:
    x, dim, size = call.x, call.scatter_dim, where.world_size
    shape = call.part_shape(size, where.rank)
    workspace = choice.begin_on(where)
    if call.counts is not None:
        return with_dim_in_front(reduce_scatter_parts(workspace, call.parts, call.reduce_op, op), dim, shape)
    parts = x.unflatten(dim, (size, shape[dim])).movedim(dim, 0).reshape(size, -1)
    return reduce_scatter_parts(workspace, parts.unbind(), call.reduce_op, op).view(shape)


def _gradient(grad: Tensor, reduce_op: str, scatter_dim: int, group_name: str, *of_ranks: Any) -> Any:
    if reduce_op == "avg":
        grad = grad / resolve_group(group_name).size()
    named = dict(zip(("group_size", "counts", "group_rank"), of_ranks, strict=True))
    return torch.ops.weft.one_shot_all_gather(grad, scatter_dim, group_name, **named)


REDUCE_SCATTER: Op = Op(
    "one_shot_reduce_scatter(Tensor x, str reduce_op, int scatter_dim, str group_name, *, int? group_size=None,"
    " SymInt[]? counts=None, int? group_rank=None) -> Tensor",
    record=ReduceScatterCall,
    validate=_validate,
    fake=lambda call, group: call.x.new_empty(call.part_shape(group.size(), group.rank())),
    kernel="reduce_scatter",
    choose=choose_part,
    run=run_reduce_scatter,
    known_by=lambda call: known_with_counts(call, (call.scatter_dim, call.reduce_op)),
    kinds=KINDS,
    with_gradient=lambda call: gradients.OneTensorFunction.apply(REDUCE_SCATTER, _gradient, call, call.x),
    own_values=("group_rank",),
)
REDUCE_SCATTER_OUT = writing_out(
    REDUCE_SCATTER, lambda call, group: call.part_shape(group.size(), group.rank()), {"out": "scatter_dim"}
)
