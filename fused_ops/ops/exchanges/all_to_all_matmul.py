"""fused_all_to_all_matmul: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather_matmul.configs import EXCHANGED_OP, GatherKernelCall
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice, choose_kernel, launch_kernel
from ...dispatch.plan import num_sms, preferred_kernel
from ...dispatch.staging import Staging, in_rows_or_columns, rows_of
from .. import gradients
from ..matmul_reduce_scatter import matmul_flops
from ..op import Op
from .all_to_all import AllToAllCall, choose_exchange_beside, run_all_to_all
from .matmul_all_to_all import checked_rows_dim

Result: TypeAlias = tuple[Tensor, Tensor | None]  #: the product, and what was exchanged if it is wanted
_ops = torch.ops.weft


class AllToAllMatmulCall(NamedTuple):
    A: Tensor
    B: Tensor
    scatter_dim: int
    group_name: str
    return_A: bool = False
    group_size: int | None = None

    @property
    def front(self) -> Tensor:
        """A with the scattered dimension in front."""
        return self.A.movedim(self.scatter_dim, 0)

    def result_shape(self, world_size: int, columns: int) -> list[int]:
        """With the scattered dimension in front."""
        rows, *others = self.front.shape[:-1]
        return [rows // world_size, *others, columns]


def _validate(call: AllToAllMatmulCall) -> tuple[AllToAllMatmulCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group, A = resolve_group(call.group_name), call.A
    dim, size = checked_rows_dim("scatter_dim", call.scatter_dim, A), group.size()
    if A.shape[dim] % size:
        raise ValueError(f"scatter_dim: A has size {A.shape[dim]} there, must be a multiple of {size} ranks")
    validation.validate_matrix("B", call.B, A.shape[-1] * size, A, "all ranks' A")
    return call._replace(scatter_dim=dim), group


def _choose(call: AllToAllMatmulCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    if call.A.device.type == "cuda" and preferred_kernel() != "one_shot":
        choice = _choose_kernel(call, group)
        if not choice.is_unfused:
            return choice
    front = call.front
    return choose_exchange_beside(EXCHANGED_OP, front, front.shape, (0, front.dim() - 1), group)


def _choose_kernel(call: AllToAllMatmulCall, group: ProcessGroup) -> Choice:
    from ....kernels.all_gather_matmul import on_cuda

    staging = Staging()
    a = staging.take("A", call.front, rows_of, on_cuda.takes_rows)
    b = staging.take("B", call.B, fits=in_rows_or_columns)
    used = GatherKernelCall(
        *(a, [b], num_sms(b.device), True, call.return_A, preferred_kernel()), exchanged=True
    )
    return choose_kernel(on_cuda.GATHER_STEPS, used, staging, group, "too little is sent and multiplied")


def _run(choice: Choice, where: Heap, call: AllToAllMatmulCall, group: ProcessGroup) -> Result:
    """As the op; the call is what validation returns."""
    if choice.algorithm == "push":
        return _on_cuda(choice, where, call)
    front, B, dim = call.front, call.B, call.scatter_dim
    exchange = AllToAllCall(front, 0, front.dim() - 1, call.group_name)
    A = run_all_to_all(choice, where, exchange, group, EXCHANGED_OP)
    out = gradients.product_beside(choice, A, B)
    return out.movedim(0, dim), (A.movedim(0, dim) if call.return_A else None)


def _on_cuda(choice: Choice, where: Heap, call: AllToAllMatmulCall) -> Result:
    def shaped(x: Tensor) -> Tensor:
        return x.view(call.result_shape(where.world_size, x.shape[-1])).movedim(0, call.scatter_dim)

    results = launch_kernel(choice, where, EXCHANGED_OP, lambda written: [*map(shaped, written)])
    return results[0], (results[1] if call.return_A else None)


def _fake(call: AllToAllMatmulCall, group: ProcessGroup) -> Result:
    A, B = call.A, call.B
    exchanged, out = (
        A.new_empty(call.result_shape(group.size(), columns)).movedim(0, call.scatter_dim)
        for columns in B.shape
    )
    return out, (exchanged if call.return_A else None)


class AllToAllMatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AllToAllMatmulCall, A: Tensor, B: Tensor) -> Any:
        _, of_A, of_B = ctx.needs_input_grad
        call = call._replace(return_A=call.return_A or of_B)
        out, exchanged = ALL_TO_ALL_MATMUL.run_below_autograd(call)
        ctx.set_materialize_grads(False)
        ctx.how = call.scatter_dim % A.dim(), call.group_name
        ctx.group_size, ctx.transposed = call.group_size, gradients.is_transposed_matrix(B)
        ctx.save_for_backward(exchanged if of_B else None, B if of_A else None)
        if exchanged is not None and not of_A:
            ctx.mark_non_differentiable(exchanged)
        return out, exchanged

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_exchanged: Tensor | None) -> Any:
        exchanged, B = ctx.saved_tensors
        (dim, name), named, grad_A, grad_B = ctx.how, {"group_size": ctx.group_size}, None, None
        if grad is not None and B is not None:
            grad_A = _ops.fused_matmul_all_to_all(grad, B.t(), dim, name, **named)
        if grad_exchanged is not None:
            back = _ops.one_shot_all_to_all(grad_exchanged, grad_exchanged.dim() - 1, dim, name, **named)
            grad_A = back if grad_A is None else grad_A + back
        if grad is not None and exchanged is not None:
            grad_B = gradients.gradient_of_matrix(exchanged, grad, ctx.transposed)
        return None, grad_A, grad_B


def _with_gradient(call: AllToAllMatmulCall) -> Result:
    out, exchanged = AllToAllMatmulFunction.apply(call, call.A, call.B)
    return out, (exchanged if call.return_A else None)


ALL_TO_ALL_MATMUL = Op(
    "fused_all_to_all_matmul(Tensor A, Tensor B, int scatter_dim, str group_name, *, bool return_A=False,"
    " int? group_size=None) -> (Tensor, Tensor?)",
    record=AllToAllMatmulCall,
    validate=_validate,
    fake=_fake,
    kernel="all_to_all",
    choose=_choose,
    run=_run,
    known_by=lambda call: ((call.scatter_dim, call.return_A), (call.A, call.B)),
    with_gradient=_with_gradient,
    flops=matmul_flops,
)
