"""moe_dispatch and moe_combine: tokens to the ranks of their experts, and back. Each is the other's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather.reference import as_bytes, reference_all_gather
from ....kernels.all_to_all.reference import reference_all_to_all
from ....kernels.device.collective.combine import Combined
from ....kernels.moe_dispatch import host
from ....kernels.moe_dispatch.reference import ExpertRanks, rows_by_expert, sum_by_rank, take_tokens
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ....symm_mem.heap.overflow import refuse_overflow
from ... import validation
from ...dispatch.choice import Choice, on_host, unfused
from ...dispatch.launch_cache import launch_again
from ...dispatch.plan import ran
from ...dispatch.stand_alone import KINDS
from ..op import Op, refuse_second_gradient
from .grouped_matmul import validate_index
from .local import define
from .moe_route import run_route, validate_route

MOST_RANKS = 31  #: a token's are the bits of an int32
_ops = torch.ops.weft


def _experts(num_experts: int, align: int, group: ProcessGroup) -> ExpertRanks:
    return ExpertRanks(num_experts, group.size(), group.rank(), align)


def _validate_places(ids: Tensor, num_experts: int, capacity: int, align: int, group_name: str) -> None:
    group = resolve_group(group_name)
    size = group.size()
    if size > MOST_RANKS:
        raise ValueError(f"group: has {size} ranks, must have at most {MOST_RANKS}")
    if num_experts < 1 or num_experts % size:
        raise ValueError(f"num_experts: is {num_experts}, must be a multiple of {size} ranks")
    of = _experts(num_experts, align, group)
    validate_route(ids, num_experts, of.first, of.each)
    if ids.shape[1] == 0:
        raise ValueError(f"topk_ids: has shape {tuple(ids.shape)}, must have a column for each choice")
    if not 0 <= capacity < 1 << 31:
        raise ValueError(f"capacity: is {capacity}, must be at least 0 and below 2**31")
    if align < 1:
        raise ValueError(f"align: is {align}, must be at least 1")


def _places(
    ids: Tensor, num_experts: int, capacity: int, align: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of = _experts(num_experts, align, resolve_group(group_name))
    _, ends, slots = run_route(ids, num_experts, of.first, of.each)
    *found, needed = rows_by_expert(ids, (ends, slots), of, capacity)
    refuse_overflow(needed, capacity)
    offs, slots, choices, ranks = found
    return offs, slots, choices, ranks


def _fake_places(
    ids: Tensor, num_experts: int, capacity: int, align: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    each = num_experts // resolve_group(group_name).size()
    sizes: list[Sequence[int]] = [(each,), ids.shape, (capacity,), (ids.shape[0],)]
    offs, slots, choices, ranks = (ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return offs, slots, choices, ranks


class MoeDispatchCall(NamedTuple):
    x: Tensor
    slots: Tensor
    choices: Tensor
    ranks: Tensor
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, self.slots, self.choices, self.ranks]


class MoeCombineCall(NamedTuple):
    y: Tensor
    slots: Tensor
    choices: Tensor
    ranks: Tensor
    weights: Tensor | None
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        given = [self.y, self.slots, self.choices, self.ranks]
        return given if self.weights is None else [*given, self.weights]

    @property
    def combined(self) -> Combined:
        weights, slots = self.weights, self.slots
        if weights is None:
            weights = torch.ones(slots.shape, dtype=torch.float32, device=slots.device)
        return Combined(self.y, slots, weights, None)


def _validate_rows(call: MoeDispatchCall | MoeCombineCall) -> ProcessGroup:
    """The index tensors of both, and the tensor that comes first."""
    group, (given, slots, choices, ranks) = resolve_group(call.group_name), call[:4]
    name = call._fields[0]
    validation.float_dtype(name, given)
    if given.dim() != 2:
        raise ValueError(f"{name}: has {given.dim()} dimensions, must have 2")
    if slots.dtype != torch.int32:
        raise TypeError(f"slots: is {slots.dtype}, must be int32")
    if slots.dim() != 2 or slots.shape[1] == 0 or slots.shape[0] % group.size():
        raise ValueError(
            f"slots: has shape {tuple(slots.shape)}, must have a row for each token of {group.size()} ranks"
        )
    validation.same_device("slots", slots, given, name)
    for index_name, index in (("choices", choices), ("ranks", ranks)):
        validate_index(index_name, index, given, name)
    if ranks.shape[0] != slots.shape[0]:
        raise ValueError(
            f"ranks: has {ranks.shape[0]} elements, must have {slots.shape[0]} as slots has rows"
        )
    return group


def _validate_dispatch(call: MoeDispatchCall) -> tuple[MoeDispatchCall, ProcessGroup]:
    group = _validate_rows(call)
    if call.x.shape[0] * group.size() != call.slots.shape[0]:
        raise ValueError(
            f"x: has {call.x.shape[0]} rows on this rank, must have {call.slots.shape[0] // group.size()}, "
            "as slots has for each rank"
        )
    return call, group


def _validate_combine(call: MoeCombineCall) -> tuple[MoeCombineCall, ProcessGroup]:
    group, (y, slots, choices, _, weights) = _validate_rows(call), call[:5]
    if y.shape[0] != choices.shape[0]:
        raise ValueError(f"y: has {y.shape[0]} rows, must have {choices.shape[0]}, as moe_dispatch returned")
    if weights is not None:
        if weights.shape != slots.shape:
            raise ValueError(
                f"weights: has shape {tuple(weights.shape)}, must have {tuple(slots.shape)} like slots"
            )
        if weights.dtype != torch.float32:
            validation.dtype_like("weights", weights, y, "y", " or torch.float32" * (y.dtype.itemsize == 2))
        validation.same_device("weights", weights, y, "y")
    return call, group


def _choose(call: MoeDispatchCall | MoeCombineCall, group: ProcessGroup) -> Choice:
    if call[0].device.type == "cpu":
        size, row = group.size(), call[0].shape[1] * call[0].element_size()
        return on_host(host.host_moe_layout(call.slots.shape[0] // size * row, size))
    return unfused("on CUDA there is no kernel for it")


def _run_dispatch(choice: Choice, where: Heap | None, call: MoeDispatchCall, group: ProcessGroup) -> Tensor:
    k = call.slots.shape[1]
    if where is not None and choice.algorithm == "host":
        workspace = choice.begin_on(where)
        return host.host_moe_dispatch(workspace, call.x, call.choices, call.ranks, k)
    ran(choice.plan_in(None))
    return take_tokens(reference_all_gather(call.x, 0, group), call.choices, k)


def _run_combine(choice: Choice, where: Heap | None, call: MoeCombineCall, group: ProcessGroup) -> Tensor:
    if where is not None and choice.algorithm == "host":
        return host.host_moe_combine(choice.begin_on(where), call.combined, call.ranks)
    ran(choice.plan_in(None))
    total, size = call.combined.total(), group.size()
    if total.numel() == 0:
        return total.new_empty(total.shape[0] // size, total.shape[1])
    received = reference_all_to_all(as_bytes(total).view(size, -1), group).view(-1).view(total.dtype)
    return sum_by_rank(received.view(size, -1, total.shape[1]), call.ranks.view(size, -1)[group.rank()])


class MoeDispatchFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MoeDispatchCall, x: Tensor) -> Tensor:
        ctx.group = call.group_name, call.group_size
        ctx.save_for_backward(call.slots, call.choices, call.ranks)
        done: Tensor = MOE_DISPATCH.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(host.OP)
        name, size = ctx.group
        return None, _ops.moe_combine(grad, *ctx.saved_tensors, None, name, group_size=size)


class MoeCombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MoeCombineCall, y: Tensor, weights: Tensor | None) -> Tensor:
        _, of_y, of_weights = ctx.needs_input_grad
        ctx.group = call.group_name, call.group_size
        kept = (y if of_weights else None), (weights if of_y or of_weights else None)
        ctx.save_for_backward(call.slots, call.choices, call.ranks, *kept)
        done: Tensor = MOE_COMBINE.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(host.COMBINE)
        slots, choices, ranks, y, weights = ctx.saved_tensors
        (name, size), (_, of_y, of_weights) = ctx.group, ctx.needs_input_grad
        rows = _ops.moe_dispatch(grad, slots, choices, ranks, name, group_size=size)
        if weights is None:
            return None, rows, None
        there, at = (choices >= 0)[:, None], choices.clamp(min=0).long()
        for_y = for_weights = None
        if of_y:
            factors = torch.where(there, weights.flatten()[at][:, None], 0).float()
            for_y = (rows * factors).to(rows.dtype)
        if of_weights:
            dots = torch.where(there, rows.float() * y, 0).sum(1)
            every = dots.new_zeros(slots.numel() + 1)
            every = every.scatter(0, torch.where(choices >= 0, choices, slots.numel()).long(), dots)
            for_weights = every[:-1].view(slots.shape).to(weights.dtype)
        return None, for_y, for_weights


def fast_moe_dispatch(call: MoeDispatchCall) -> Tensor | None:
    """As the op, if such a call was made before; else None, and nothing happened. All may be anything."""
    results = launch_again(host.OP, None, call.tensors, call.group_name, KINDS)
    return None if results is None else results[0]


def fast_moe_combine(call: MoeCombineCall) -> Tensor | None:
    """Likewise."""
    results = launch_again(host.COMBINE, None, call.tensors, call.group_name, KINDS)
    return None if results is None else results[0]


define(
    "moe_places(Tensor topk_ids, int num_experts, SymInt capacity, int align, str group_name)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _validate_places,
    _places,
    _fake_places,
)
MOE_DISPATCH = Op(
    "moe_dispatch(Tensor x, Tensor slots, Tensor choices, Tensor ranks, str group_name, *, int? group_size=None)"
    " -> Tensor",
    record=MoeDispatchCall,
    validate=_validate_dispatch,
    fake=lambda call, group: call.x.new_empty(call.choices.shape[0], call.x.shape[1]),
    kernel="moe_dispatch",
    sends_nothing=lambda call, group: call.x.numel() == 0,
    choose=_choose,
    run=_run_dispatch,
    fast=fast_moe_dispatch,
    known_by=lambda call, group: (None, call.tensors),
    with_gradient=lambda call: MoeDispatchFunction.apply(call, call.x),
)
MOE_COMBINE = Op(
    "moe_combine(Tensor y, Tensor slots, Tensor choices, Tensor ranks, Tensor? weights, str group_name, *,"
    " int? group_size=None) -> Tensor",
    record=MoeCombineCall,
    validate=_validate_combine,
    fake=lambda call, group: call.y.new_empty(call.slots.shape[0] // group.size(), call.y.shape[1]),
    kernel="moe_dispatch",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=_choose,
    run=_run_combine,
    fast=fast_moe_combine,
    known_by=lambda call, group: (None, call.tensors),
    with_gradient=lambda call: MoeCombineFunction.apply(call, call.y, call.weights),
)
