"""moe_combine: what experts have made of tokens' rows, summed where the tokens came from; moe_dispatch turned round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather.reference import as_bytes
from ....kernels.all_to_all.reference import reference_all_to_all
from ....kernels.device.collective.combine import Combined
from ....kernels.moe_dispatch import BACK
from ....kernels.moe_dispatch.configs import MoeProblem
from ....kernels.moe_dispatch.reference import host_moe_combine, sum_by_rank
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice, launch_push
from ...dispatch.plan import ran
from ...dispatch.stand_alone import KINDS
from ..all_gather import gather_within
from ..gradients import refuse_second_gradient
from ..op import Op, on_device, tensors_given
from .moe_dispatch import KNOWN, choose_rows, validate_places

_ops = torch.ops.weft


def _validate_combine(call: Any) -> tuple[Any, ProcessGroup]:
    group, (y, slots, choices, _, weights) = validate_places(call), call[:5]
    if y.shape[0] != choices.shape[0]:
        raise ValueError(f"y: has {y.shape[0]} rows, must have {choices.shape[0]}, as moe_dispatch returned")
    if weights is not None:
        shape = slots.shape[0] // group.size(), slots.shape[1]
        validation.must_have_shape("weights", weights, shape, " like topk_ids")
        if weights.dtype != torch.float32:
            validation.dtype_like("weights", weights, y, "y", " or torch.float32" * (y.dtype.itemsize == 2))
        validation.same_device("weights", weights, y, "y")
    return call, group


def _choose_combine(call: Any, group: ProcessGroup) -> Choice:
    (rows, hidden), y, (tokens, choices) = call.y.shape, call.y, call.slots.shape
    wide = call.weights is None or call.weights.dtype != y.dtype
    problem = MoeProblem("combine", tokens // group.size(), hidden, rows, choices, y.dtype, wide)
    return choose_rows(y, problem, group)


def _run_combine(choice: Choice, where: Heap | None, call: Any, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Also all ranks' weights."""
    slots, size = call.slots, group.size()
    with on_device(call.y):
        if call.weights is None:
            weights = torch.ones(slots.shape, dtype=torch.float32, device=slots.device)
        else:
            weights = gather_within(call.weights, group, BACK)
        combined = Combined(call.y, slots, weights)
        if where is not None and choice.algorithm == "host":
            return host_moe_combine(choice.begin_on(where), combined, call.ranks), weights
        if where is not None and choice.algorithm == "push":
            shape, given = (slots.shape[0] // size, call.y.shape[1]), (call.y, slots, call.ranks, weights)
            return launch_push(BACK, replace(choice, known=None), where, given, [(shape, None)])[0], weights
        ran(choice.plan_of())
        total = combined.total()
        if total.numel() == 0:
            return total.new_empty(total.shape[0] // size, total.shape[1]), weights
        received = reference_all_to_all(as_bytes(total).view(size, -1), group).view(-1).view(total.dtype)
        own = call.ranks.view(size, -1)[group.rank()]
        return sum_by_rank(received.view(size, -1, total.shape[1]), own), weights


class MoeCombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
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


def _fake_combine(call: Any, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    y, weights, slots = call.y, call.weights, call.slots
    dtype = torch.float32 if weights is None else weights.dtype
    return y.new_empty(slots.shape[0] // group.size(), y.shape[1]), y.new_empty(slots.shape, dtype=dtype)


MOE_COMBINE = Op(
    f"moe_combine(Tensor y, {KNOWN}, Tensor? weights, str group_name, *, int? group_size=None) -> (Tensor, Tensor)",
    validate=_validate_combine,
    fake=_fake_combine,
    kernel="moe_dispatch",
    sends_nothing=lambda call, group: call.slots.shape[0] * call.y.shape[1] == 0,
    choose=_choose_combine,
    run=_run_combine,
    known_by=lambda call: (None, tensors_given(call)),
    kinds=KINDS,
    with_gradient=lambda call: MoeCombineFunction.apply(call, call.y, call.weights),
)
