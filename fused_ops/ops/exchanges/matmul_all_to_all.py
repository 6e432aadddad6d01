"""fused_matmul_all_to_all: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.matmul_reduce_scatter.configs import APART_OP, Epilogue, ScatterKernelCall
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice, choose_kernel, launch_kernel
from ...dispatch.plan import num_sms, preferred_kernel
from ...dispatch.staging import Staging, in_rows_or_columns
from ..gradients import ProductFunction, gradient_of_matrix, product_beside
from ..matmul_reduce_scatter import matmul_flops
from ..op import Op
from .all_to_all import AllToAllCall, choose_exchange_beside, run_all_to_all

_ops = torch.ops.weft


class MatmulAllToAllCall(NamedTuple):
    A: Tensor
    B: Tensor
    gather_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def front(self) -> Tensor:
        """A with the gathered dimension in front."""
        return self.A.movedim(self.gather_dim, 0)

    def result_shape(self, world_size: int) -> list[int]:
        """With the gathered dimension in front."""
        rows, *others = self.front.shape[:-1]
        return [rows * world_size, *others, self.B.shape[1] // world_size]


def checked_rows_dim(name: str, dim: int, A: Tensor) -> int:
    """A dimension of A but for the last one, as one that is not negative."""
    validation.left_operand("A", A)
    found = validation.checked_dim(name, dim, "A", A.dim())
    if found == A.dim() - 1:
        raise ValueError(f"{name}: is {dim}, the last dimension of A, must be one of its rows")
    return found


def _validate(call: MatmulAllToAllCall) -> tuple[MatmulAllToAllCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group."""
    group, A, B = resolve_group(call.group_name), call.A, call.B
    dim = checked_rows_dim("gather_dim", call.gather_dim, A)
    validation.validate_matrix("B", B, A.shape[-1], A, "A")
    if B.shape[1] % group.size():
        raise ValueError(f"B: has {B.shape[1]} columns, must have a multiple of {group.size()} ranks")
    return call._replace(gather_dim=dim), group


def _choose(call: MatmulAllToAllCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    if call.A.device.type == "cuda" and preferred_kernel() != "one_shot":
        choice = _choose_kernel(call, group)
        if not choice.is_unfused:
            return choice
    front = call.front
    shape = [*front.shape[:-1], call.B.shape[1]]
    return choose_exchange_beside(APART_OP, call.A, shape, (front.dim() - 1, 0), group)


def _choose_kernel(call: MatmulAllToAllCall, group: ProcessGroup) -> Choice:
    from ....kernels.matmul_reduce_scatter import on_cuda

    A, B, staging = call.front, call.B, Staging()
    a = staging.take("A", A, lambda x: x.view(1, 1, x.shape[:-1].numel(), x.shape[-1]))
    b = staging.take("B", B, fits=in_rows_or_columns)
    epilogue = Epilogue(A.dtype, apart=True)
    used = ScatterKernelCall(a, b, num_sms(B.device), epilogue, split_n=True, preferred=preferred_kernel())
    return choose_kernel(on_cuda.SCATTER_STEPS, used, staging, group, "too little is multiplied and sent")


def _run(choice: Choice, where: Heap, call: MatmulAllToAllCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    if choice.algorithm == "push":
        shape, dim = call.result_shape(where.world_size), call.gather_dim
        return launch_kernel(choice, where, APART_OP, lambda made: [made[0].view(shape).movedim(0, dim)])[0]
    front = call.front
    product = product_beside(choice, front, call.B)
    exchange = AllToAllCall(product, front.dim() - 1, 0, call.group_name)
    return run_all_to_all(choice, where, exchange, group, APART_OP).movedim(0, call.gather_dim)


def _gradients(grad: Tensor, A: Any, B: Any, transposed: bool, gather_dim: int, *of_group: Any) -> Any:
    (name, size), dim, last, grad_A = of_group, gather_dim % grad.dim(), grad.dim() - 1, None
    if B is not None:
        named = {"return_A": A is not None, "group_size": size}
        grad_A, back = _ops.fused_all_to_all_matmul(grad, B.t(), dim, name, **named)
    else:
        back = _ops.one_shot_all_to_all(grad, dim, last, name, group_size=size)
    return grad_A, None if A is None else gradient_of_matrix(A, back, transposed)


MATMUL_ALL_TO_ALL: Op = Op(
    "fused_matmul_all_to_all(Tensor A, Tensor B, int gather_dim, str group_name, *, int? group_size=None) -> Tensor",
    record=MatmulAllToAllCall,
    validate=_validate,
    fake=lambda call, group: call.A.new_empty(call.result_shape(group.size())).movedim(0, call.gather_dim),
    kernel="all_to_all",
    sends_nothing=lambda call, group: 0 in call.result_shape(group.size()),
    choose=_choose,
    run=_run,
    known_by=lambda call: (call.gather_dim, (call.A, call.B)),
    with_gradient=lambda call: ProductFunction.apply(MATMUL_ALL_TO_ALL, _gradients, call, *call[:2]),
    flops=matmul_flops,
)
