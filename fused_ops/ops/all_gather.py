"""one_shot_all_gather and one_shot_gather: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather import INTO, OP, TO_ROOT
from ...kernels.all_gather.reference import (
    as_bytes,
    reference_all_gather,
    reference_all_gather_uneven,
    reference_gather,
)
from ...kernels.device.collective.host_exchange import exchange_layout, gather, gather_to
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.choice import Choice, Known, on_host, unfused
from ..dispatch.launch_cache import launch_again
from ..dispatch.plan import heap_or_reason, ran
from ..dispatch.stand_alone import KINDS, StandAlone, choose_alone, run_alone
from . import gradients
from .op import Op, writing_out

#: Why calls with ``counts`` that differ run unfused on CUDA.
UNEVEN = "on CUDA there is no kernel for ranks of different counts"


class AllGatherCall(NamedTuple):
    x: Tensor
    gather_dim: int
    group_name: str
    group_size: int | None = None
    counts: Sequence[int] | None = None
    group_rank: int | None = None

    def whole_shape(self, world_size: int) -> list[int]:
        """That of the result; ``gather_dim`` is not negative."""
        shape, counts = list(self.x.shape), self.counts
        shape[self.gather_dim] = shape[self.gather_dim] * world_size if counts is None else sum(counts)
        return shape


def _validate(call: Any) -> tuple[Any, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group, x = resolve_group(call.group_name), call.x
    validation.has_dimensions("x", x)
    validation.real("x", x)
    dim = validation.checked_dim("gather_dim", call.gather_dim, "x", x.dim())
    if call.counts is not None:
        validation.counts_of_ranks(call.counts, call.group_rank, group)
        own, rank = call.counts[group.rank()], group.rank()
        if own != x.shape[dim]:
            raise ValueError(
                f"counts[{rank}]: is {own}, must be {x.shape[dim]}, the size of rank {rank}'s x in dimension {dim}"
            )
    return call._replace(gather_dim=dim), group


def known_with_counts(call: Any, arguments: Hashable) -> Known:
    """By which the launch cache knows a call of x and ``counts``."""
    if (counts := call.counts) is None:
        return arguments, [call.x]
    symbolic = any(type(n) is not int for n in counts)
    return None if symbolic else ((arguments, tuple(counts)), [call.x])


def sends_no_counts(x: Tensor, dim: int, counts: Sequence[int] | None) -> bool:
    """Whether no rank has a part of x, by what all ranks know."""
    if counts is None:
        return x.numel() == 0
    return sum(counts) == 0 or prod(x.shape[:dim] + x.shape[dim + 1 :]) == 0


def gather_within(x: Tensor, group: ProcessGroup, op: str) -> Tensor:
    """All ranks' x along its first dimension, as a part of a call of another op, which errors name."""
    done = launch_again(op, 0, (x,), group.group_name, KINDS)
    if done is not None:
        return done[0]
    call = AllGatherCall(x, 0, group.group_name)
    where: Any = heap_or_reason(op, "all_gather", x.device, group, empty=x.numel() == 0)
    choice = unfused(where) if isinstance(where, str) else choose_gather(call, group)
    if choice.algorithm == "push":
        choice = replace(choice, known=(0, (x,)))
    return run_all_gather(choice, where, call, group, op=op)


def choose_gather(call: AllGatherCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    if call.x.device.type == "cpu":
        nbytes = call.x.nbytes if call.counts is None else max(bytes_of_ranks(call, call.counts))
        return on_host(exchange_layout(nbytes, group.size()))
    if call.counts is not None and len(set(call.counts)) > 1:
        return unfused(UNEVEN)
    return choose_alone(_alone(call, None, group.size(), OP), group)


def _alone(call: AllGatherCall, out: Tensor | None, size: int, op: str) -> StandAlone:
    given = [call.x] if out is None else [out, call.x]
    return StandAlone(OP, op, given, call.whole_shape(size), call.x.shape, gather_dim=call.gather_dim)


def bytes_of_ranks(call: Any, counts: Sequence[int]) -> list[int]:
    dim, shape = call.gather_dim, call.x.shape
    row = prod(shape[:dim] + shape[dim + 1 :]) * call.x.element_size()
    return [n * row for n in counts]


def with_dim_in_front(flat: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """What lies with a dimension in front, contiguous in its shape."""
    rows = flat.view(shape[dim], *shape[:dim], *shape[dim + 1 :])
    return rows.movedim(0, dim).reshape(-1).view(*shape)


def run_all_gather(
    choice: Choice,
    where: Heap,
    call: AllGatherCall,
    group: ProcessGroup,
    out: Tensor | None = None,
    op: str = OP,
) -> Tensor:
    """As the op, or as a part of a call of ``op``; the call is what validation returns. ``out``: what the result is
    written to, and then returned; of its shape, with any strides."""
    op = op if out is None else INTO
    if choice.is_unfused:
        ran(choice.plan_of())
        if call.counts is None:
            done = reference_all_gather(call.x, call.gather_dim, group)
        else:
            done = _unevenly(call, lambda x, sizes: reference_all_gather_uneven(x, sizes, group))
    elif choice.algorithm == "host":
        done = _on_cpu(choice, where, call, op)
    else:
        done = run_alone(choice, where, _alone(call, out, where.world_size, op))
    return done if out is None or out is done else out.copy_(done)


def _on_cpu(choice: Choice, where: Heap, call: AllGatherCall, op: str) -> Tensor:
    x, shape = call.x, call.whole_shape(where.world_size)
    workspace = choice.begin_on(where)
    if call.counts is not None:
        return _unevenly(call, lambda x, sizes: gather(workspace, x, op, sizes))
    stacked = gather(workspace, as_bytes(x.contiguous()), op)
    parts = stacked.view(x.dtype).view(where.world_size, *x.shape)
    return parts.movedim(0, call.gather_dim).reshape(-1).view(shape)


def _unevenly(call: AllGatherCall, gather: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
    """``gather``: puts all ranks' bytes one after the other."""
    x, dim = call.x, call.gather_dim
    stacked = gather(as_bytes(x.movedim(dim, 0).contiguous()), bytes_of_ranks(call, call.counts or ()))
    return with_dim_in_front(stacked.view(x.dtype), dim, call.whole_shape(0))


def _gradient(grad: Tensor, gather_dim: int, group_name: str, *of_ranks: Any) -> Any:
    named = dict(zip(("group_size", "counts", "group_rank"), of_ranks, strict=True))
    if grad.dtype not in validation.DTYPES:
        return gradients.reduce_scatter(grad, gather_dim, group_name, named["counts"])
    return torch.ops.weft.one_shot_reduce_scatter(grad, "sum", gather_dim, group_name, **named)


ALL_GATHER: Op = Op(
    "one_shot_all_gather(Tensor x, int gather_dim, str group_name, *, int? group_size=None, SymInt[]? counts=None,"
    " int? group_rank=None) -> Tensor",
    record=AllGatherCall,
    validate=_validate,
    fake=lambda call, group: call.x.new_empty(call.whole_shape(group.size())),
    kernel="all_gather",
    sends_nothing=lambda call, group: sends_no_counts(call.x, call.gather_dim, call.counts),
    choose=choose_gather,
    run=run_all_gather,
    known_by=lambda call: known_with_counts(call, call.gather_dim),
    kinds=KINDS,
    with_gradient=lambda call: gradients.OneTensorFunction.apply(ALL_GATHER, _gradient, call, call.x),
    own_values=("group_rank",),
    own_by_counts={"x": "gather_dim"},
)
ALL_GATHER_OUT = writing_out(
    ALL_GATHER, lambda call, group: call.whole_shape(group.size()), {"x": "gather_dim"}
)


class GatherCall(NamedTuple):
    x: Tensor
    gather_dim: int
    root: int
    group_name: str
    group_size: int | None = None
    counts: Sequence[int] | None = None
    group_rank: int | None = None

    def counts_of(self, group: ProcessGroup) -> Sequence[int]:
        """All ranks' sizes in ``gather_dim``, which is not negative."""
        return self.counts or [self.x.shape[self.gather_dim]] * group.size()

    def result_shape(self, group: ProcessGroup) -> list[int]:
        shape = list(self.x.shape)
        shape[self.gather_dim] = sum(self.counts_of(group)) if group.rank() == self.root else 0
        return shape


def _validate_to_root(call: GatherCall) -> tuple[GatherCall, ProcessGroup]:
    """The same, of a call with a root."""
    call, group = _validate(call)
    if not 0 <= call.root < group.size():
        raise ValueError(f"root: is {call.root}, must be from 0 to {group.size() - 1}, a rank of the group")
    validation.rank_of_graph(call.group_rank, group)
    return call, group


def _choose_to_root(call: GatherCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    if call.x.device.type == "cpu":
        return on_host(exchange_layout(max(bytes_of_ranks(call, call.counts_of(group))), group.size()))
    if len(set(call.counts_of(group))) > 1:
        return unfused(UNEVEN)
    return choose_alone(_alone_to_root(call, group), group)


def _alone_to_root(call: GatherCall, group: ProcessGroup) -> StandAlone:
    x, shape = call.x, call.result_shape(group)
    return StandAlone(TO_ROOT, TO_ROOT, [x], shape, x.shape, gather_dim=call.gather_dim, root=call.root)


def run_gather(choice: Choice, where: Heap, call: GatherCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    if choice.algorithm == "push":
        return run_alone(choice, where, _alone_to_root(call, group))
    x, dim, shape = call.x, call.gather_dim, call.result_shape(group)
    sent, sizes = as_bytes(x.movedim(dim, 0).contiguous()), bytes_of_ranks(call, call.counts_of(group))
    if choice.is_unfused:
        ran(choice.plan_of())
        stacked = reference_gather(sent, sizes, call.root, group) if sum(sizes) else sent
    else:
        stacked = gather_to(choice.begin_on(where), sent, sizes, call.root, TO_ROOT)
    return with_dim_in_front(stacked.view(x.dtype), dim, shape)


GATHER = replace(
    ALL_GATHER,
    schema="one_shot_gather(Tensor x, int gather_dim, int root, str group_name, *, int? group_size=None,"
    " SymInt[]? counts=None, int? group_rank=None) -> Tensor",
    record=GatherCall,
    validate=_validate_to_root,
    fake=lambda call, group: call.x.new_empty(call.result_shape(group)),
    choose=_choose_to_root,
    run=run_gather,
    known_by=lambda call: known_with_counts(call, (call.gather_dim, call.root)),
    with_gradient=": the other ranks have no result of which they could ask for it; pass x.detach()",
)
