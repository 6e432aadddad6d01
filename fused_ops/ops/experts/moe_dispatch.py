"""moe_dispatch and moe_combine: tokens to the ranks of their experts, and back. Each is the other's gradient.

``moe_dispatch_again`` sends other rows of the same tokens: the gradient of a combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather.reference import as_bytes, reference_all_gather
from ....kernels.all_to_all.reference import reference_all_to_all
from ....kernels.device.collective.combine import Combined
from ....kernels.device.collective.host_exchange import exchange_layout
from ....kernels.device.collective.rounds import rounds_layout
from ....kernels.moe_dispatch import BACK, OP
from ....kernels.moe_dispatch.configs import MoeProblem, choose_moe, estimate_moe_us
from ....kernels.moe_dispatch.reference import (
    ExpertRanks,
    host_moe_combine,
    host_moe_dispatch,
    sum_by_rank,
    take_tokens,
)
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ....symm_mem.heap.overflow import raise_noted
from ... import validation
from ...dispatch.choice import Choice, on_host, unfused
from ...dispatch.launch_cache import launch_again
from ...dispatch.plan import num_sms, ran
from ...dispatch.stand_alone import KINDS
from ...dispatch.workspaces import ALL_REDUCE
from ..all_gather import gather_within
from ..op import Op, on_device, refuse_gradient, refuse_second_gradient
from .combined import CombineHow, launch_combined
from .grouped_matmul import validate_index
from .moe_route import run_dispatch_route, validate_route

MOST_RANKS = 31  #: a token's are the bits of an int32
_ops = torch.ops.weft


class MoeDispatchCall(NamedTuple):
    x: Tensor
    topk_ids: Tensor
    num_experts: int
    group_name: str
    capacity: int | None = None
    align: int = 1
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, self.topk_ids]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.num_experts, self.capacity, self.align

    def experts(self, group: ProcessGroup) -> ExpertRanks:
        return ExpertRanks(self.num_experts, group.size(), group.rank(), self.align)

    def rows(self, world_size: int) -> int:
        """Of each rank's experts."""
        if self.capacity is not None:
            return self.capacity
        each, align = self.num_experts // world_size, self.align
        most = world_size * self.topk_ids.shape[0] * min(self.topk_ids.shape[1], each) + each * (align - 1)
        return -(-most // align) * align


class MoeDispatchAgainCall(NamedTuple):
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

    def combined(self, weights: Tensor) -> Combined:
        """``weights``: of all ranks' tokens."""
        return Combined(self.y, self.slots, weights, None)


def _validate_dispatch(call: MoeDispatchCall) -> tuple[MoeDispatchCall, ProcessGroup]:
    group, x, ids = resolve_group(call.group_name), call.x, call.topk_ids
    size = group.size()
    validation.float_dtype("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: has {x.dim()} dimensions, must have 2: [T, H]")
    if size > MOST_RANKS:
        raise ValueError(f"group: has {size} ranks, must have at most {MOST_RANKS}")
    if call.num_experts < 1 or call.num_experts % size:
        raise ValueError(f"num_experts: is {call.num_experts}, must be a multiple of {size} ranks")
    of = call.experts(group)
    validate_route(ids, call.num_experts, of.first, of.each)
    if ids.shape[1] == 0:
        raise ValueError(f"topk_ids: has shape {tuple(ids.shape)}, must have a column for each choice")
    if ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids: has {ids.shape[0]} rows, must have {x.shape[0]} like x")
    validation.same_device("topk_ids", ids, x, "x")
    if not 1 <= call.align < 1 << 31:
        raise ValueError(f"align: is {call.align}, must be at least 1 and below 2**31")
    if call.capacity is not None and not 0 <= call.capacity < 1 << 31:
        raise ValueError(f"capacity: is {call.capacity}, must be at least 0 and below 2**31")
    return call, group


def _validate_places(call: MoeDispatchAgainCall | MoeCombineCall) -> ProcessGroup:
    """What ``moe_dispatch`` has returned, and the tensor that goes with it."""
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


def _validate_again(call: MoeDispatchAgainCall) -> tuple[MoeDispatchAgainCall, ProcessGroup]:
    group = _validate_places(call)
    if call.x.shape[0] * group.size() != call.slots.shape[0]:
        raise ValueError(
            f"x: has {call.x.shape[0]} rows, must have {call.slots.shape[0] // group.size()}, as were dispatched"
        )
    return call, group


def _validate_combine(call: MoeCombineCall) -> tuple[MoeCombineCall, ProcessGroup]:
    group, (y, slots, choices, _, weights) = _validate_places(call), call[:5]
    if y.shape[0] != choices.shape[0]:
        raise ValueError(f"y: has {y.shape[0]} rows, must have {choices.shape[0]}, as moe_dispatch returned")
    if weights is not None:
        shape = slots.shape[0] // group.size(), slots.shape[1]
        if weights.shape != shape:
            raise ValueError(f"weights: has shape {tuple(weights.shape)}, must have {shape} like topk_ids")
        if weights.dtype != torch.float32:
            validation.dtype_like("weights", weights, y, "y", " or torch.float32" * (y.dtype.itemsize == 2))
        validation.same_device("weights", weights, y, "y")
    return call, group


def _choose_rows(given: Tensor, problem: MoeProblem, group: ProcessGroup) -> Choice:
    size, rank, nbytes = group.size(), group.rank(), problem.tokens * given.shape[1] * given.element_size()
    if given.device.type == "cpu":
        return on_host(exchange_layout(nbytes, size))
    if (reason := problem.why_not(size)) is not None:
        return unfused(reason)
    from ....kernels.moe_dispatch import cuda_kernel

    config = choose_moe(problem.way, size, num_sms(given.device))
    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=rounds_layout(problem.vectors, size, config),
        predicted_us=estimate_moe_us(problem.way, nbytes, size),
        programs=lambda: [cuda_kernel.launched_moe(size, rank, problem.defined)],
        how=CombineHow(problem, lambda place: cuda_kernel.MoeLauncher(place, problem, config)),
    )


def _choose_dispatch(call: MoeDispatchCall, group: ProcessGroup) -> Choice:
    (tokens, hidden), rows = call.x.shape, call.rows(group.size())
    given = tokens, hidden, rows, call.topk_ids.shape[1], call.x.dtype
    filled = call.num_experts // group.size() if call.align > 1 else 0
    return _choose_rows(call.x, MoeProblem("dispatch", *given, experts=filled), group)


def _choose_again(call: MoeDispatchAgainCall, group: ProcessGroup) -> Choice:
    (tokens, hidden), rows = call.x.shape, call.choices.shape[0]
    return _choose_rows(
        call.x, MoeProblem("dispatch", tokens, hidden, rows, call.slots.shape[1], call.x.dtype), group
    )


def _choose_combine(call: MoeCombineCall, group: ProcessGroup) -> Choice:
    (rows, hidden), y, (tokens, choices) = call.y.shape, call.y, call.slots.shape
    wide = call.weights is None or call.weights.dtype != y.dtype
    problem = MoeProblem("combine", tokens // group.size(), hidden, rows, choices, y.dtype, wide)
    return _choose_rows(y, problem, group)


def _run_dispatch(
    choice: Choice, where: Heap | None, call: MoeDispatchCall, group: ProcessGroup
) -> tuple[Tensor, ...]:
    raise_noted(call.group_name)  # before anything is launched: it breaks no group
    with on_device(call.x):
        ids = gather_within(call.topk_ids, group, OP)
        if choice.algorithm == "host" and where is not None:
            # All ranks have the ids: they find the same, also an overflow.
            choice.workspace_on(where).launched()
        of, capacity = call.experts(group), call.rows(group.size())
        offs, *places = run_dispatch_route(ids, of, capacity, call.group_name)
        again = MoeDispatchAgainCall(call.x, *places, call.group_name)
        return _run_again(choice, where, again, group, offs if call.align > 1 else None), offs, *places


def _run_again(
    choice: Choice,
    where: Heap | None,
    call: MoeDispatchAgainCall,
    group: ProcessGroup,
    offs: Tensor | None = None,
) -> Tensor:
    """``offs``: rows that fill experts up are to be zeros; on CUDA rows of no choice hold anything else."""
    k = call.slots.shape[1]
    if where is not None and choice.algorithm == "host":
        return host_moe_dispatch(choice.begin_on(where), call.x, call.choices, call.ranks, k)
    if where is not None and choice.algorithm == "push":
        given = [call.x, call.slots, call.ranks, *(() if offs is None else (call.choices, offs))]
        shape = call.choices.shape[0], call.x.shape[1]
        return launch_combined(OP, choice, where, given, shape, None)
    ran(choice.plan_in(None))
    return take_tokens(reference_all_gather(call.x, 0, group), call.choices, k)


def _run_combine(
    choice: Choice, where: Heap | None, call: MoeCombineCall, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Also all ranks' weights."""
    slots, size = call.slots, group.size()
    with on_device(call.y):
        if call.weights is None:
            weights = torch.ones(slots.shape, dtype=torch.float32, device=slots.device)
        else:
            weights = gather_within(call.weights, group, BACK)
        combined = call.combined(weights)
        if where is not None and choice.algorithm == "host":
            return host_moe_combine(choice.begin_on(where), combined, call.ranks), weights
        if where is not None and choice.algorithm == "push":
            shape, given = (slots.shape[0] // size, call.y.shape[1]), (call.y, slots, call.ranks, weights)
            return launch_combined(BACK, choice, where, given, shape, None), weights
        ran(choice.plan_in(None))
        total = combined.total()
        if total.numel() == 0:
            return total.new_empty(total.shape[0] // size, total.shape[1]), weights
        received = reference_all_to_all(as_bytes(total).view(size, -1), group).view(-1).view(total.dtype)
        own = call.ranks.view(size, -1)[group.rank()]
        return sum_by_rank(received.view(size, -1, total.shape[1]), own), weights


class MoeDispatchFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MoeDispatchCall, x: Tensor) -> tuple[Tensor, ...]:
        ctx.group = call.group_name, call.group_size
        ctx.set_materialize_grads(False)
        rows, *index = MOE_DISPATCH.run_below_autograd(call)
        ctx.save_for_backward(*index[1:])
        ctx.mark_non_differentiable(*index)
        return rows, *index

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
        refuse_second_gradient(OP)
        if grad is None:
            return None, None
        name, size = ctx.group
        return None, _ops.moe_combine(grad, *ctx.saved_tensors, None, name, group_size=size)[0]


class MoeCombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MoeCombineCall, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.group = call.group_name, call.group_size
        ctx.set_materialize_grads(False)
        out, every = MOE_COMBINE.run_below_autograd(call)
        ctx.save_for_backward(
            call.slots, call.choices, call.ranks, y if ctx.needs_input_grad[2] else None, every
        )
        ctx.mark_non_differentiable(every)
        return out, every

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        refuse_second_gradient(BACK)
        if grad is None:
            return None, None, None
        slots, choices, ranks, y, weights = ctx.saved_tensors
        (name, size), (_, of_y, of_weights) = ctx.group, ctx.needs_input_grad
        rows = _ops.moe_dispatch_again(grad, slots, choices, ranks, name, group_size=size)
        there, at = choices >= 0, choices.clamp(min=0).long()
        for_y = for_weights = None
        if of_y:
            given = torch.cat([weights.flatten(), weights.new_zeros(1)])  # also of no tokens
            for_y = torch.where(there[:, None], rows * given[at].float()[:, None], 0).to(rows.dtype)
        if of_weights:
            dots = torch.where(there[:, None], rows.float() * y, 0).sum(1)
            every = dots.new_zeros(slots.numel() + 1)
            every = every.scatter(0, torch.where(there, choices, slots.numel()).long(), dots)
            every = every[:-1].view(slots.shape).to(weights.dtype)
            # Each choice is of one rank: what is added up are zeros.
            for_weights = _ops.one_shot_reduce_scatter(every, "sum", 0, name, group_size=size)
        return None, for_y, for_weights


def _listed_again(op: str, arguments: Any, call: Any) -> list[Tensor] | None:
    return launch_again(op, arguments, call.tensors, call.group_name, KINDS)


def _fast_again(call: MoeDispatchAgainCall) -> Tensor | None:
    results = _listed_again(MOE_DISPATCH_AGAIN.name, None, call)
    return None if results is None else results[0]


def _fake_dispatch(call: MoeDispatchCall, group: ProcessGroup) -> tuple[Tensor, ...]:
    x, ids, size = call.x, call.topk_ids, group.size()
    rows, tokens = call.rows(size), size * ids.shape[0]
    sizes: list[Sequence[int]] = [(call.num_experts // size,), (tokens, ids.shape[1]), (rows,), (tokens,)]
    return x.new_empty(rows, x.shape[1]), *(ids.new_empty(each, dtype=torch.int32) for each in sizes)


def _fake_combine(call: MoeCombineCall, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    y, weights, slots = call.y, call.weights, call.slots
    dtype = torch.float32 if weights is None else weights.dtype
    return y.new_empty(slots.shape[0] // group.size(), y.shape[1]), y.new_empty(slots.shape, dtype=dtype)


_KNOWN = "Tensor slots, Tensor choices, Tensor ranks"
MOE_DISPATCH = Op(
    "moe_dispatch(Tensor x, Tensor topk_ids, int num_experts, str group_name, *, SymInt? capacity=None, int align=1,"
    " int? group_size=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    record=MoeDispatchCall,
    validate=_validate_dispatch,
    fake=_fake_dispatch,
    kernel="moe_dispatch",
    sends_nothing=lambda call, group: call.x.numel() == 0,
    choose=_choose_dispatch,
    run=_run_dispatch,
    fast=lambda call: _listed_again(OP, call.arguments, call),
    known_by=lambda call, group: (call.arguments, call.tensors),
    with_gradient=lambda call: MoeDispatchFunction.apply(call, call.x),
)
MOE_DISPATCH_AGAIN = Op(
    f"moe_dispatch_again(Tensor x, {_KNOWN}, str group_name, *, int? group_size=None) -> Tensor",
    record=MoeDispatchAgainCall,
    validate=_validate_again,
    fake=lambda call, group: call.x.new_empty(call.choices.shape[0], call.x.shape[1]),
    kernel="moe_dispatch",
    sends_nothing=lambda call, group: call.x.numel() == 0,
    choose=_choose_again,
    run=_run_again,
    fast=_fast_again,
    known_by=lambda call, group: (None, call.tensors),
    with_gradient=lambda call: refuse_gradient(_validate_again, call, " in the gradient of moe_combine"),
)
MOE_COMBINE = Op(
    f"moe_combine(Tensor y, {_KNOWN}, Tensor? weights, str group_name, *, int? group_size=None) -> (Tensor, Tensor)",
    record=MoeCombineCall,
    validate=_validate_combine,
    fake=_fake_combine,
    kernel="moe_dispatch",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=_choose_combine,
    run=_run_combine,
    fast=lambda call: _listed_again(BACK, None, call),
    known_by=lambda call, group: (None, call.tensors),
    with_gradient=lambda call: MoeCombineFunction.apply(call, call.y, call.weights),
)
