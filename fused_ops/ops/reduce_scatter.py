"""one_shot_reduce_scatter: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from ...kernels.device.collective.host_exchange import exchange_layout, reduce_scatter_parts
from ...kernels.reduce_scatter import INTO, OP
from ...kernels.reduce_scatter.reference import reference_reduce_scatter, reference_reduce_scatter_uneven
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.choice import Choice, on_host, unfused
from ..dispatch.launch_cache import launch_again
from ..dispatch.plan import ran
from ..dispatch.stand_alone import KINDS, StandAlone, choose_alone, run_alone
from ..dispatch.workspaces import ALL_REDUCE
from . import op
from .all_gather import UNEVEN, key_with_counts
from .op import Op

if TYPE_CHECKING:
    from ...kernels.device.jit.program import Program

_ops = torch.ops.weft


class ReduceScatterCall(NamedTuple):
    x: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    group_size: int | None = None
    counts: Sequence[int] | None = None
    group_rank: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x]

    def part_shape(self, world_size: int, rank: int) -> list[int]:
        """That of the result; ``scatter_dim`` is not negative."""
        shape, counts = list(self.x.shape), self.counts
        dim = self.scatter_dim
        shape[dim] = shape[dim] // world_size if counts is None else counts[rank]
        return shape

    @property
    def key(self) -> Hashable:
        """By which the launch cache knows the call."""
        return key_with_counts((self.scatter_dim, self.reduce_op), self.counts)

    @property
    def parts(self) -> list[Tensor]:
        """One for each rank, flat."""
        assert self.counts is not None
        rows = self.x.movedim(self.scatter_dim, 0)
        return [part.reshape(-1) for part in rows.split([*self.counts])]


class ReduceScatterOutCall(NamedTuple):
    out: Tensor
    x: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    group_size: int | None = None
    counts: Sequence[int] | None = None
    group_rank: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.out, self.x]

    @property
    def without_out(self) -> ReduceScatterCall:
        return ReduceScatterCall(*self[1:])


def _validate(call: ReduceScatterCall) -> tuple[ReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group, x = resolve_group(call.group_name), call.x
    if x.dim() < 1:
        raise ValueError("x: has no dimension, must have 1 or more")
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


def _validate_out(call: ReduceScatterOutCall) -> tuple[ReduceScatterCall, Tensor, ProcessGroup]:
    """The same, for an ``out`` that the result is written to."""
    found, group = _validate(call.without_out)
    validation.result_tensor(call.out, found.part_shape(group.size(), group.rank()), call.x)
    return found, call.out, group


def fast_reduce_scatter(
    x: Tensor,
    reduce_op: str,
    dim: int,
    group_name: str,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> Tensor | None:
    """As the op, or into ``out``, if such a call was made before; else None, and nothing happened. All may be
    anything."""
    if dim < 0 and isinstance(x, Tensor):
        dim += x.dim()
    if counts is not None and any(type(n) is not int for n in counts):
        return None  # symbolic
    op, tensors = (OP, (x,)) if out is None else (INTO, (out, x))
    results = launch_again(op, key_with_counts((dim, reduce_op), counts), tensors, group_name, KINDS)
    if results is None:
        return None
    return results[0] if out is None else out


def choose_part(call: ReduceScatterCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    size = group.size()
    if call.x.device.type == "cpu":
        nbytes, counts = call.x.nbytes, call.counts
        part = nbytes // size if counts is None else nbytes // sum(counts) * max(counts)
        return on_host(exchange_layout(part, size))
    if call.counts is not None and len(set(call.counts)) > 1:
        return unfused(UNEVEN)
    return choose_scatter_on_cuda(_alone(call, None, size), call.reduce_op, group)


def choose_scatter_on_cuda(
    alone: StandAlone, reduce_op: str, group: ProcessGroup, kind: str = ALL_REDUCE
) -> Choice:
    """In workspaces of a kind."""
    size, rank, dtype = group.size(), group.rank(), alone.x.dtype

    def program() -> Program:
        from ...kernels.reduce_scatter.cuda_kernel import reduce_scatter_program

        return reduce_scatter_program(size, rank, dtype, reduce_op)

    return choose_alone(alone, size, program, (dtype, reduce_op), kind)


def _alone(call: ReduceScatterCall, out: Tensor | None, size: int) -> StandAlone:
    given, op = ([call.x], OP) if out is None else ([out, call.x], INTO)
    dim, part = call.scatter_dim, call.part_shape(size, 0)
    return StandAlone(OP, op, call.key, given, part, part, scatter_dim=dim)


def run_reduce_scatter(
    choice: Choice, where: Heap, call: ReduceScatterCall, group: ProcessGroup, out: Tensor | None = None
) -> Tensor:
    """As the op; the call is what validation returns.

    Args:
        out: what the result is written to, and then returned; of its shape, with any strides.
    """
    if choice.is_unfused:
        ran(choice.plan_in(None))
        if call.counts is None:
            done = reference_reduce_scatter(call.x, call.reduce_op, call.scatter_dim, group)
        else:
            done = _joined(
                reference_reduce_scatter_uneven(call.parts, call.reduce_op, group), call, group.rank()
            )
    elif choice.algorithm == "host":
        done = on_cpu(choice, where, call, OP if out is None else INTO)
    else:
        done = run_alone(choice, where, _alone(call, out, where.world_size))
    return done if out is None or out is done else out.copy_(done)


def scatter_by_choice(
    choice: Choice, where: Heap, call: ReduceScatterCall, group: ProcessGroup, op: str
) -> Tensor:
    """As a part of a call of another op that runs unfused or between CPU ranks."""
    if choice.is_unfused:
        ran(choice.plan_in(None))
        return reference_reduce_scatter(call.x, call.reduce_op, call.scatter_dim, group)
    return on_cpu(choice, where, call, op)


def on_cpu(choice: Choice, where: Heap, call: ReduceScatterCall, op: str) -> Tensor:
    """Between CPU ranks. ``op``: whose call it is, for errors."""
    x, dim, size = call.x, call.scatter_dim, where.world_size
    shape = call.part_shape(size, where.rank)
    workspace = choice.begin_on(where)
    if call.counts is not None:
        return _joined(reduce_scatter_parts(workspace, call.parts, call.reduce_op, op), call, where.rank)
    parts = x.unflatten(dim, (size, shape[dim])).movedim(dim, 0).reshape(size, -1)
    return reduce_scatter_parts(workspace, parts.unbind(), call.reduce_op, op).view(shape)


def _joined(part: Tensor, call: ReduceScatterCall, rank: int) -> Tensor:
    """The result of this rank's part, flat, in which ``scatter_dim`` comes first."""
    dim, shape = call.scatter_dim, call.part_shape(0, rank)
    rows = part.view(shape[dim], *shape[:dim], *shape[dim + 1 :])
    return rows.movedim(0, dim).reshape(-1).view(shape)


class ReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ReduceScatterCall, x: Tensor) -> Tensor:
        ctx.reduce_op, ctx.scatter_dim = call.reduce_op, call.scatter_dim
        ctx.group_name, ctx.group_size, ctx.counts = call.group_name, call.group_size, call.counts
        ctx.group_rank = call.group_rank
        done: Tensor = REDUCE_SCATTER.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.reduce_op == "avg":
            grad = grad / resolve_group(ctx.group_name).size()
        args = (grad, ctx.scatter_dim, ctx.group_name)
        named = {"group_size": ctx.group_size, "group_rank": ctx.group_rank}
        return None, _ops.one_shot_all_gather(*args, **named, counts=ctx.counts)


def _fake(call: ReduceScatterCall, group: ProcessGroup) -> Tensor:
    return call.x.new_empty(call.part_shape(group.size(), group.rank()))


def _run_out(choice: Choice, where: Heap, call: ReduceScatterCall, out: Tensor, group: ProcessGroup) -> None:
    run_reduce_scatter(choice, where, call, group, out)
    increment_version(out)  # as on the fast path


def _with_gradient(call: ReduceScatterCall) -> Any:
    op.refuse_gradient_of_reduction(call.reduce_op)
    return ReduceScatterFunction.apply(call, call.x)


REDUCE_SCATTER = Op(
    "one_shot_reduce_scatter(Tensor x, str reduce_op, int scatter_dim, str group_name, *, int? group_size=None,"
    " SymInt[]? counts=None, int? group_rank=None) -> Tensor",
    record=ReduceScatterCall,
    validate=_validate,
    fake=_fake,
    kernel="reduce_scatter",
    sends_nothing=lambda call, group: call.x.numel() == 0,
    choose=choose_part,
    run=run_reduce_scatter,
    fast=lambda call: fast_reduce_scatter(
        call.x, call.reduce_op, call.scatter_dim, call.group_name, None, call.counts
    ),
    known_by=lambda call, group: (call.key, [call.x]),
    with_gradient=_with_gradient,
    own_values=("group_rank",),
)
REDUCE_SCATTER_OUT = Op(
    "one_shot_reduce_scatter_out(Tensor(a!) out, Tensor x, str reduce_op, int scatter_dim, str group_name, *,"
    " int? group_size=None, SymInt[]? counts=None, int? group_rank=None) -> ()",
    record=ReduceScatterOutCall,
    validate=_validate_out,
    fake=lambda *_: None,
    kernel="reduce_scatter",
    sends_nothing=lambda call, out, group: call.x.numel() == 0,
    choose=lambda call, out, group: choose_part(call, group),
    run=_run_out,
    fast=lambda call: fast_reduce_scatter(
        call.x, call.reduce_op, call.scatter_dim, call.group_name, call.out, call.counts
    ),
    known_by=lambda call, out, group: (call.key, [out, call.x]),
    with_gradient=lambda call: op.refuse_gradient(_validate_out, call, op.INTO),
    functional=(REDUCE_SCATTER, lambda call: call.without_out),
    own_values=("group_rank",),
    own_by_counts={"out": "scatter_dim"},
)
