"""moe_dispatch: tokens to the ranks of their experts; its gradient is a combine.

``moe_dispatch_again`` sends other rows of the same tokens: the gradient of a combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather.reference import reference_all_gather
from ....kernels.device.collective.host_exchange import exchange_layout
from ....kernels.device.collective.rounds import rounds_layout
from ....kernels.device.comm.ll_exchange import ROUTE_BLOCKS, WARP, ExchangeLayout, slots_for, up
from ....kernels.moe_dispatch import OP
from ....kernels.moe_dispatch.configs import MoeProblem, Routed, choose_moe, estimate_moe_us
from ....kernels.moe_dispatch.reference import ExpertRanks, host_moe_dispatch, rows_by_expert, take_tokens
from ....kernels.moe_route.reference import MOST_EXPERTS
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ....symm_mem.heap.overflow import overflow_note, raise_noted, refuse_overflow
from ... import validation
from ...dispatch.choice import Choice, KernelOf, Known, launch_push, on_host, unfused
from ...dispatch.plan import num_sms, ran
from ...dispatch.stand_alone import KINDS
from ...dispatch.workspaces import ALL_REDUCE
from ..all_gather import gather_within
from ..gradients import refuse_second_gradient
from ..op import Op, on_device
from .grouped_matmul import validate_index
from .moe_route import has_route_kernel, run_route, validate_route

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

    def experts(self, group: ProcessGroup) -> ExpertRanks:
        return ExpertRanks(self.num_experts, group.size(), group.rank(), self.align)

    def rows(self, world_size: int) -> int:
        """Of each rank's experts."""
        if self.capacity is not None:
            return self.capacity
        each, align = self.num_experts // world_size, self.align
        most = world_size * self.topk_ids.shape[0] * min(self.topk_ids.shape[1], each) + each * (align - 1)
        return -(-most // align) * align

    def index_sizes(self, world_size: int) -> list[Sequence[int]]:
        """Of offs, slots, choices and ranks."""
        (tokens, k), each = self.topk_ids.shape, self.num_experts // world_size
        return [(each,), (world_size * tokens, k), (self.rows(world_size),), (world_size * tokens,)]


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


def validate_places(call: Any) -> ProcessGroup:
    """Of a call that begins with a tensor, and what ``moe_dispatch`` has returned for it."""
    group, (given, slots, choices, ranks) = resolve_group(call.group_name), call[:4]
    name = call._fields[0]
    validation.float_dtype(name, given)
    validation.dimensions(name, given, 2)
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


def _validate_again(call: Any) -> tuple[Any, ProcessGroup]:
    group = validate_places(call)
    if call.x.shape[0] * group.size() != call.slots.shape[0]:
        raise ValueError(
            f"x: has {call.x.shape[0]} rows, must have {call.slots.shape[0] // group.size()}, as were dispatched"
        )
    return call, group


def choose_rows(given: Tensor, problem: MoeProblem, group: ProcessGroup) -> Choice:
    size, rank, nbytes = group.size(), group.rank(), problem.tokens * given.shape[1] * given.element_size()
    if given.device.type == "cpu":
        return on_host(exchange_layout(nbytes, size))
    if (reason := problem.why_not(size)) is not None:
        return unfused(reason)
    from ....kernels.moe_dispatch import cuda_kernel

    config = choose_moe(problem, size, num_sms(given.device))
    return Choice(
        "push",
        kind=ALL_REDUCE,
        layout=rounds_layout(problem.vectors, size, config),
        predicted_us=estimate_moe_us(problem.way, nbytes, size),
        programs=lambda: [cuda_kernel.moe_program(size, rank, problem.defined)],
        how=KernelOf(problem, lambda place: cuda_kernel.MoeLauncher(place, problem, config)),
    )


def _choose_dispatch(call: MoeDispatchCall, group: ProcessGroup) -> Choice:
    (tokens, hidden), rows = call.x.shape, call.rows(group.size())
    given = tokens, hidden, rows, call.topk_ids.shape[1], call.x.dtype
    each, routed = call.num_experts // group.size(), _is_routed(call, group)
    problem = MoeProblem(
        "dispatch",
        *given,
        experts=each if call.align > 1 else 0,
        routed=Routed(each, call.topk_ids.dtype.itemsize // 4, ROUTE_BLOCKS) if routed else None,
    )
    choice = choose_rows(call.x, problem, group)
    if choice.algorithm != "push" or not routed:
        return choice
    from ....kernels.moe_route import cuda_kernel as route

    of, ids, moe, name = call.experts(group), call.topk_ids, choice.how, call.group_name
    choices = of.world_size * ids.numel()
    sizes = route.RouteSizes(of.first, of.each, choices, ids.shape[1], of.num_experts, rows, of.align)

    def make(place: Any) -> Any:
        note = overflow_note(call.x.device, name)
        return route.DispatchLauncher(moe.make(place), place, sizes, ids.dtype, note)

    program = of.world_size, of.rank, ids.dtype
    slots = up(slots_for(-(-ids.numel() // 4), ROUTE_BLOCKS), 2 * WARP)
    return replace(
        choice,
        layout=choice.layout.joined(
            ExchangeLayout(of.world_size, slots, choice.layout.blocks + ROUTE_BLOCKS)
        ),
        programs=lambda: [*choice.programs(), route.dispatch_route_program(*program)],
        how=KernelOf((moe.key, sizes, ids.dtype), make),
    )


def _is_routed(call: MoeDispatchCall, group: ProcessGroup) -> bool:
    """Whether one kernel gathers the ids on CUDA and finds what ``rows_by_expert`` does."""
    size = group.size()
    fits = call.num_experts <= MOST_EXPERTS
    fits = fits and max(size * call.topk_ids.numel(), call.rows(size)) < 1 << 31
    return fits and has_route_kernel(call.topk_ids)


def _choose_again(call: Any, group: ProcessGroup) -> Choice:
    (tokens, hidden), rows = call.x.shape, call.choices.shape[0]
    return choose_rows(
        call.x, MoeProblem("dispatch", tokens, hidden, rows, call.slots.shape[1], call.x.dtype), group
    )


def _run_dispatch(
    choice: Choice, where: Heap | None, call: MoeDispatchCall, group: ProcessGroup
) -> tuple[Tensor, ...]:
    raise_noted(call.group_name)
    with on_device(call.x):
        of, capacity = call.experts(group), call.rows(group.size())
        if choice.algorithm == "push" and where is not None and _is_routed(call, group):
            shapes: list[Any] = [((capacity, call.x.shape[1]), call.x.dtype)]
            shapes += [(each, torch.int32) for each in call.index_sizes(group.size())]
            return (*launch_push(OP, choice, where, [call.x, call.topk_ids], shapes),)
        ids = gather_within(call.topk_ids, group, OP)
        if choice.algorithm == "host" and where is not None:
            # All ranks have the ids: they find the same, also an overflow.
            choice.workspace_on(where).launched()
        _, *routed = run_route(ids, of.num_experts, of.first, of.each)
        offs, slots, choices, ranks, needed = rows_by_expert(ids, (routed[0], routed[1]), of, capacity)
        refuse_overflow(needed, capacity, call.group_name)
        places = slots, choices, ranks
        again = MOE_DISPATCH_AGAIN.record(call.x, *places, call.group_name)
        return _run_again(choice, where, again, group, offs if call.align > 1 else None), offs, *places


def _run_again(
    choice: Choice, where: Heap | None, call: Any, group: ProcessGroup, offs: Tensor | None = None
) -> Tensor:
    """``offs``: rows that fill experts up are to be zeros; on CUDA rows of no choice hold anything else."""
    k = call.slots.shape[1]
    if where is not None and choice.algorithm == "host":
        return host_moe_dispatch(choice.begin_on(where), call.x, call.choices, call.ranks, k)
    if where is not None and choice.algorithm == "push":
        given = [call.x, call.slots, call.ranks, *(() if offs is None else (call.choices, offs))]
        shape = call.choices.shape[0], call.x.shape[1]
        return launch_push(OP, replace(choice, known=None), where, given, [(shape, None)])[0]
    ran(choice.plan_of())
    return take_tokens(reference_all_gather(call.x, 0, group), call.choices, k)


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


def _known_by(call: MoeDispatchCall) -> Known:
    raise_noted(call.group_name)  # before anything is launched: it breaks no group
    symbolic = not isinstance(call.capacity, int | None)
    return None if symbolic else ((call.num_experts, call.capacity, call.align), (call.x, call.topk_ids))


def _fake_dispatch(call: MoeDispatchCall, group: ProcessGroup) -> tuple[Tensor, ...]:
    x, size = call.x, group.size()
    index = (x.new_empty(each, dtype=torch.int32) for each in call.index_sizes(size))
    return x.new_empty(call.rows(size), x.shape[1]), *index


KNOWN = "Tensor slots, Tensor choices, Tensor ranks"
MOE_DISPATCH = Op(
    "moe_dispatch(Tensor x, Tensor topk_ids, int num_experts, str group_name, *, SymInt? capacity=None, int align=1,"
    " int? group_size=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    record=MoeDispatchCall,
    validate=_validate_dispatch,
    fake=_fake_dispatch,
    kernel="moe_dispatch",
    choose=_choose_dispatch,
    run=_run_dispatch,
    known_by=_known_by,
    kinds=KINDS,
    with_gradient=lambda call: MoeDispatchFunction.apply(call, call.x),
)
MOE_DISPATCH_AGAIN = Op(
    f"moe_dispatch_again(Tensor x, {KNOWN}, str group_name, *, int? group_size=None) -> Tensor",
    validate=_validate_again,
    fake=lambda call, group: call.x.new_empty(call.choices.shape[0], call.x.shape[1]),
    kernel="moe_dispatch",
    choose=_choose_again,
    run=_run_again,
    known_by=lambda call: (None, call[:4]),
    kinds=KINDS,
    with_gradient=" in the gradient of moe_combine",
)
