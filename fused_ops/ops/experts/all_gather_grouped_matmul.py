"""fused_all_gather_grouped_matmul: tokens of all ranks, and their products with this rank's experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather_matmul.configs import CopiedConfig
from ....kernels.grouped_matmul import OP
from ....kernels.grouped_matmul.reference import activated, experts_of_rows
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice
from .. import all_gather
from ..gradients import refuse_second_gradient
from ..op import Op, on_device
from .arriving_tokens import choose_copies, multiply_arriving
from .grouped_matmul import multiply, validate_experts, validate_experts_bias, validate_index

Result: TypeAlias = tuple[Tensor | None, list[Tensor]]
_ops = torch.ops.weft


class AllGatherGroupedMatmulCall(NamedTuple):
    A_shard: Tensor
    Bs: list[Tensor]
    rows: Tensor
    offs: Tensor
    gather_dim: int
    group_name: str
    return_A: bool = False
    biases: list[Tensor] | None = None
    swiglu: bool = False
    group_size: int | None = None


def _validate(call: AllGatherGroupedMatmulCall) -> tuple[AllGatherGroupedMatmulCall, ProcessGroup]:
    """The call with dimension 0, and the group."""
    group, A_shard = resolve_group(call.group_name), call.A_shard
    validation.float_dtype("A_shard", A_shard)
    if A_shard.dim() != 2:
        raise ValueError(f"A_shard: has {A_shard.dim()} dimensions, must be a matrix [T / W, K]")
    if call.gather_dim not in (0, -2):
        raise ValueError(f"gather_dim: is {call.gather_dim}, must be 0: tokens are rows")
    if not call.Bs:
        raise ValueError("Bs: is empty, must hold at least one tensor of matrices")
    for i, B in enumerate(call.Bs):
        validate_experts(f"Bs[{i}]", B, A_shard, "A_shard", swiglu=call.swiglu)
    validate_index("offs", call.offs, A_shard, "A_shard")
    for i, B in enumerate(call.Bs):
        if B.shape[0] != call.offs.shape[0]:
            raise ValueError(
                f"Bs[{i}]: has {B.shape[0]} experts, must have {call.offs.shape[0]}, as offs has elements"
            )
    if call.biases is not None:
        if len(call.biases) != len(call.Bs):
            raise ValueError(f"biases: holds {len(call.biases)} tensors, must hold {len(call.Bs)} as Bs does")
        for i, (bias, B) in enumerate(zip(call.biases, call.Bs, strict=True)):
            validate_experts_bias(f"biases[{i}]", bias, B, A_shard, "A_shard")
    validate_index("rows", call.rows, A_shard, "A_shard")
    if A_shard.shape[0] == 0 and call.rows.shape[0] != 0:
        raise ValueError(f"A_shard: has no rows, must have those that {call.rows.shape[0]} rows name")
    return call._replace(gather_dim=0), group


def _choose(call: AllGatherGroupedMatmulCall, group: ProcessGroup) -> Choice:
    """By copy engines, or as the gather alone."""
    copied = None if call.A_shard.device.type == "cpu" else choose_copies(call.A_shard, group)
    if copied is not None:
        return copied
    return all_gather.choose_gather(all_gather.AllGatherCall(call.A_shard, 0, call.group_name), group)


def _run(choice: Choice, where: Heap | None, call: AllGatherGroupedMatmulCall, group: ProcessGroup) -> Result:
    """As the op; the call is what validation returns."""
    biases: list[Any] = call.biases or [None] * len(call.Bs)
    terms = list(zip(call.Bs, biases, strict=True))
    if choice.algorithm == CopiedConfig.algorithm:
        assert where is not None
        given = call.A_shard, call.rows, call.offs
        named = {"return_A": call.return_A, "swiglu": call.swiglu}
        return multiply_arriving(choice, where, given, terms, **named)
    with on_device(call.A_shard):
        A = all_gather.gather_within(call.A_shard, group, OP)
        outs = multiply(A, terms, call.offs, call.rows, swiglu=call.swiglu)
    return (A if call.return_A else None), outs


def _fake(call: AllGatherGroupedMatmulCall, group: ProcessGroup) -> Result:
    A_shard = call.A_shard
    m, k = A_shard.shape
    A = A_shard.new_empty(m * group.size(), k) if call.return_A else None
    return A, [A_shard.new_empty(call.rows.shape[0], B.shape[2] // (1 + call.swiglu)) for B in call.Bs]


class AllGatherGroupedMatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllGatherGroupedMatmulCall, A_shard: Tensor, *Bs_and_biases: Tensor) -> Any:
        Bs, (_, of_A, *of_rest) = call.Bs, ctx.needs_input_grad
        of_Bs = of_rest[: len(Bs)]
        if any(of_Bs):
            call = call._replace(return_A=True)
        A, outs = ALL_GATHER_GROUPED_MATMUL.run_below_autograd(call)
        ctx.set_materialize_grads(False)
        ctx.group, ctx.tokens = (call.group_name, call.group_size), A_shard.shape[0]
        ctx.transposed = [B.stride(1) == 1 for B in Bs]
        kept = Bs if of_A else [None] * len(Bs)
        ctx.save_for_backward(A if any(of_Bs) else None, call.rows, call.offs, *kept)
        if A is not None and not of_A:
            ctx.mark_non_differentiable(A)
        return A, *outs

    @staticmethod
    def backward(ctx: Any, grad_A: Tensor | None, *grads: Tensor | None) -> Any:
        refuse_second_gradient(OP)
        A, rows, offs, *Bs = ctx.saved_tensors
        _, of_A, *of_rest = ctx.needs_input_grad
        of_Bs, of_biases = of_rest[: len(Bs)], of_rest[len(Bs) :]
        there = [None if g is None else g.contiguous() for g in grads]
        grad_shard = _gradient_of_shard(ctx, grad_A, there, Bs, (rows, offs)) if of_A else None
        grad_Bs = [
            _ops.grouped_matmul_gradient_of_b(A, g, offs, rows, transposed)
            if wanted and g is not None
            else None
            for wanted, g, transposed in zip(of_Bs, there, ctx.transposed, strict=True)
        ]
        grad_biases = [
            _ops.sum_by_index(g, experts_of_rows(offs, g.shape[0]), offs.shape[0])
            if wanted and g is not None
            else None
            for wanted, g in zip(of_biases, there[: len(of_biases)], strict=True)
        ]
        return None, grad_shard, *grad_Bs, *grad_biases


def _gradient_of_shard(
    ctx: Any,
    grad_A: Tensor | None,
    grads: Sequence[Tensor | None],
    Bs: Sequence[Tensor],
    index: tuple[Tensor, Tensor],
) -> Tensor | None:
    """Of tokens of all ranks the products of all Bs are summed in float32, and the ranks' sums scattered."""
    rows, offs = index
    products = [
        _ops.grouped_matmul(g, B.mT, offs, None, None).float()
        for g, B in zip(grads, Bs, strict=True)
        if g is not None
    ]
    total = grad_A
    if products:
        dtype, (name, size) = Bs[0].dtype, ctx.group
        here = torch.arange(rows.shape[0], device=rows.device) < offs[-1]
        count = ctx.tokens * resolve_group(name).size()
        of_tokens = _ops.sum_by_index(sum(products), torch.where(here, rows, -1), count)
        total = (of_tokens if grad_A is None else of_tokens + grad_A).to(dtype)
    if total is None:
        return None
    name, size = ctx.group
    found: Tensor = _ops.one_shot_reduce_scatter(total, "sum", 0, name, group_size=size)
    return found


def _with_gradient(call: AllGatherGroupedMatmulCall) -> Result:
    _validate(call)  # the products alone take more
    products = call._replace(swiglu=False)
    A, *outs = AllGatherGroupedMatmulFunction.apply(products, call.A_shard, *call.Bs, *(call.biases or ()))
    return (A if call.return_A else None), [activated(y, swiglu=call.swiglu) for y in outs]


ALL_GATHER_GROUPED_MATMUL = Op(
    "fused_all_gather_grouped_matmul(Tensor A_shard, Tensor[] Bs, Tensor rows, Tensor offs, int gather_dim,"
    " str group_name, *, bool return_A=False, Tensor[]? biases=None, bool swiglu=False, int? group_size=None)"
    " -> (Tensor?, Tensor[])",
    record=AllGatherGroupedMatmulCall,
    validate=_validate,
    fake=_fake,
    kernel="all_gather",
    choose=_choose,
    run=_run,
    with_gradient=_with_gradient,
    flops=lambda A_shard, Bs, rows, *_, **__: 2 * rows[0] * A_shard[1] * sum(B[2] for B in Bs),
    own_dims={"Bs": (0,), "rows": (0,), "offs": (0,), "biases": (0,)},
    own_on_cuda=True,
)
