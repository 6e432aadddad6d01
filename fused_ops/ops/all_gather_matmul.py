"""fused_all_gather_matmul: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather_matmul import OP
from ...kernels.all_gather_matmul.configs import GatherKernelCall
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.choice import Choice, choose_kernel, host_or, launch_kernel
from ..dispatch.plan import num_sms, preferred_between
from ..dispatch.staging import Staging, in_rows, in_rows_or_columns, rows_of
from . import gradients
from .all_gather import AllGatherCall, run_all_gather
from .op import Op

Result: TypeAlias = tuple[Tensor | None, list[Tensor]]
_ops = torch.ops.weft


class AllGatherMatmulCall(NamedTuple):
    A_shard: Tensor
    Bs: list[Tensor]
    gather_dim: int
    group_name: str
    return_A: bool = True
    group_size: int | None = None


def _validate(call: AllGatherMatmulCall) -> tuple[AllGatherMatmulCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group, A_shard = resolve_group(call.group_name), call.A_shard
    validation.left_operand("A_shard", A_shard)
    dim = validation.checked_dim("gather_dim", call.gather_dim, "A_shard", A_shard.dim())
    if not call.Bs:
        raise ValueError("Bs: is empty, must hold at least one matrix")
    k = A_shard.shape[-1] * (group.size() if dim == A_shard.dim() - 1 else 1)
    for i, B in enumerate(call.Bs):
        validation.validate_matrix(f"Bs[{i}]", B, k, A_shard, "the gathered A")
    return call._replace(gather_dim=dim), group


def _front(call: AllGatherMatmulCall) -> Tensor:
    A_shard, dim = call.A_shard, call.gather_dim
    return A_shard if dim == A_shard.dim() - 1 else A_shard.movedim(dim, 0)


def _choose_on_cuda(call: AllGatherMatmulCall, group: ProcessGroup) -> Choice:
    from ...kernels.all_gather_matmul import on_cuda
    from ...kernels.device.gemm.operands import is_transposed

    Bs, front = call.Bs, _front(call)
    staging, split_k = Staging(), call.gather_dim == front.dim() - 1
    a = staging.take("A_shard", front, rows_of, on_cuda.takes_rows)
    # The kernel for 16 bits reads them all: of some in rows and some in columns, those in columns are copied.
    alike = front.dtype.itemsize > 2 or len({is_transposed(B) for B in Bs}) == 1
    fits = in_rows_or_columns if alike else in_rows
    bs = [staging.take(f"Bs[{i}]", B, fits=fits) for i, B in enumerate(Bs)]
    preferred = preferred_between(group, a.device, (group.size() - 1) * a.nbytes)
    used = GatherKernelCall(a, bs, num_sms(a.device), split_k, call.return_A, preferred)
    return choose_kernel(on_cuda.GATHER_STEPS, used, staging, group, "too little is gathered and multiplied")


def _run(choice: Choice, where: Heap, call: AllGatherMatmulCall, group: ProcessGroup) -> Result:
    """As the op; the call is what validation returns."""
    if choice.algorithm not in ("host", "unfused"):
        return _on_cuda(choice, where, call)
    dim, front = call.gather_dim, _front(call)
    last = dim == front.dim() - 1
    gather = AllGatherCall(front, dim if last else 0, call.group_name)
    A = run_all_gather(choice, where, gather, group, op=OP)
    rows = A.flatten(0, -2)
    product = partial(_in_rank_order, rows, front.shape[-1]) if choice.algorithm == "host" else rows.matmul
    outs = [product(B).view(*A.shape[:-1], B.shape[1]) for B in call.Bs]
    if not last:
        A, *outs = (x.movedim(0, dim) for x in (A, *outs))
    return (A if call.return_A else None), outs


def _in_rank_order(rows: Tensor, k: int, B: Tensor) -> Tensor:
    """A product as the kernels have it: of each rank's k columns in float32, added up and rounded once."""
    size = rows.shape[1] // k
    parts = [a.float() @ b.float() for a, b in zip(rows.chunk(size, 1), B.chunk(size), strict=True)]
    return reduce(torch.add, parts).to(rows.dtype)


def _on_cuda(choice: Choice, where: Heap, call: AllGatherMatmulCall) -> Result:
    dim, front, size = call.gather_dim, _front(call), where.world_size

    def shaped(flat: Tensor) -> Tensor:
        """Rows of all ranks as the op returns them."""
        if dim == front.dim() - 1:
            return flat.view(*front.shape[:-1], flat.shape[-1])
        return flat.view(size * front.shape[0], *front.shape[1:-1], flat.shape[-1]).movedim(0, dim)

    outs = launch_kernel(choice, where, OP, lambda written: [*map(shaped, written)])
    return (outs.pop() if call.return_A else None), outs


def empty_gathered(
    A_shard: Tensor, dim: int, group: ProcessGroup, columns: Any, dtype: torch.dtype | None = None
) -> Tensor:
    """As many rows as are gathered, with so many columns; None: with those of the gathered A."""
    shape = list(A_shard.shape)
    shape[dim] = shape[dim] * group.size()
    front = 0 if dim == A_shard.dim() - 1 else dim
    moved = [shape[front], *shape[:front], *shape[front + 1 : -1], shape[-1] if columns is None else columns]
    return A_shard.new_empty(moved, dtype=dtype).movedim(0, front)


def _fake(call: AllGatherMatmulCall, group: ProcessGroup) -> Result:
    out = partial(empty_gathered, call.A_shard, call.gather_dim, group)
    return (out(None) if call.return_A else None), [out(B.shape[1]) for B in call.Bs]


class AllGatherMatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllGatherMatmulCall, A_shard: Tensor, *Bs: Tensor) -> Any:
        _, of_A, *of_Bs = ctx.needs_input_grad
        needs_A = any(of_Bs)
        if needs_A and not call.return_A:
            call = call._replace(return_A=True)
        A, outs = ALL_GATHER_MATMUL.run_below_autograd(call)
        ctx.set_materialize_grads(False)
        ctx.gather_dim, ctx.group_name, ctx.group_size = call.gather_dim, call.group_name, call.group_size
        # Each operand for the gradients of the others alone: else nobody keeps it, and it may be changed, as in torch.
        ctx.save_for_backward(A if needs_A else None, *(Bs if of_A else [None] * len(Bs)))
        ctx.transposed = [gradients.is_transposed_matrix(B) for B in Bs]
        constants = [out for out, of_B in zip(outs, of_Bs, strict=True) if not (of_A or of_B)]
        ctx.mark_non_differentiable(*([] if of_A or A is None else [A]), *constants)
        # Also where the caller does not want it: to a second backward what is saved and is no result is a constant.
        return A, *outs

    @staticmethod
    def backward(ctx: Any, grad_A: Tensor | None, *grads: Tensor | None) -> Any:
        A, *Bs = ctx.saved_tensors
        _, of_A, *of_Bs = ctx.needs_input_grad
        pairs = [(g, B) for g, B in zip(grads, Bs, strict=True) if g is not None]
        grad_shard: Tensor | None = None
        if of_A:
            if pairs:
                # One op for all of them, which sums the products.
                g, B, *more = [x for g, B in pairs for x in (g, B.t())]
                args = (g, B, "sum", ctx.gather_dim, ctx.group_name)
                named = {"more": more} if more else {}
                grad_shard = _ops.fused_matmul_reduce_scatter(*args, **named, group_size=ctx.group_size)
            if grad_A is not None:
                rest = gradients.reduce_scatter(grad_A, ctx.gather_dim, ctx.group_name)
                grad_shard = rest if grad_shard is None else grad_shard + rest
        grad_Bs = [
            gradients.gradient_of_matrix(A, g, transposed) if needed and g is not None else None
            for needed, g, transposed in zip(of_Bs, grads, ctx.transposed, strict=True)
        ]
        return None, grad_shard, *grad_Bs


def _with_gradient(call: AllGatherMatmulCall) -> Result:
    A, *outs = AllGatherMatmulFunction.apply(call, call.A_shard, *call.Bs)
    return (A if call.return_A else None), outs


def gathered_matmul_flops(
    A_shard: Sequence[int], Bs: Sequence[Sequence[int]], gather_dim: int, group_name: str, **_: Any
) -> int:
    return 2 * resolve_group(group_name).size() * prod(A_shard) * sum(B[1] for B in Bs)


ALL_GATHER_MATMUL = Op(
    "fused_all_gather_matmul(Tensor A_shard, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True,"
    " int? group_size=None) -> (Tensor?, Tensor[])",
    record=AllGatherMatmulCall,
    validate=_validate,
    fake=_fake,
    kernel="all_gather_matmul",
    choose=host_or(lambda call, group: call.A_shard.nbytes, _choose_on_cuda),
    run=_run,
    known_by=lambda call: ((call.gather_dim, call.return_A), (call.A_shard, *call.Bs)),
    with_gradient=_with_gradient,
    flops=gathered_matmul_flops,
    own_dims={"Bs": (1,)},
)
