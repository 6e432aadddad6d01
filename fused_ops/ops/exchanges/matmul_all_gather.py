"""fused_matmul_all_gather: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.host_exchange import exchange_layout
from ....kernels.matmul_all_gather import OP
from ....kernels.matmul_all_gather.configs import MatmulAllGatherKernelCall, estimate_gathered_after_us
from ....symm_mem import resolve_group
from ....symm_mem.heap.heap import Heap
from ... import validation
from ...dispatch.choice import Choice, choose_kernel, launch_kernel, on_host
from ...dispatch.plan import preferred_kernel
from ...dispatch.staging import Staging, in_rows_or_columns, rows_of
from ...dispatch.stand_alone import StandAlone, choose_alone, run_beside
from ..all_gather import AllGatherCall, run_all_gather
from ..gradients import ProductFunction, gradients_of_factors, product_beside
from ..matmul_reduce_scatter import matmul_flops
from ..op import Op


class MatmulAllGatherCall(NamedTuple):
    A: Tensor
    B: Tensor
    group_name: str
    group_size: int | None = None

    def shape(self, ranks: int = 1) -> list[int]:
        """That of so many ranks' products side by side."""
        return [*self.A.shape[:-1], self.B.shape[1] * ranks]


def _validate(call: MatmulAllGatherCall) -> tuple[MatmulAllGatherCall, ProcessGroup]:
    group, A = resolve_group(call.group_name), call.A
    validation.left_operand("A", A)
    validation.validate_matrix("B", call.B, A.shape[-1], A, "A")
    return call, group


def _choose(call: MatmulAllGatherCall, group: ProcessGroup) -> Choice:
    from ....kernels.matmul_all_gather.copied_products import COPIED_STEPS

    A, B, size = call.A, call.B, group.size()
    if A.device.type == "cpu":
        return on_host(exchange_layout(prod(call.shape()) * A.element_size(), size))
    staging = Staging()
    used = MatmulAllGatherKernelCall(
        staging.take("A", A, rows_of), staging.take("B", B, fits=in_rows_or_columns)
    )
    if preferred_kernel() != "one_shot":
        choice = choose_kernel(COPIED_STEPS, used, staging, group, "too little is multiplied and gathered")
        if not choice.is_unfused:
            return choice
    choice = choose_alone(_gathered(call, A, size), group)
    if choice.is_unfused:
        return choice
    return replace(choice, algorithm="one_shot", predicted_us=estimate_gathered_after_us(used.problem(size)))


def _gathered(call: MatmulAllGatherCall, product: Tensor, size: int) -> StandAlone:
    """The gather of the product, or of one of its dtype and device."""
    return StandAlone(OP, OP, [product], call.shape(size), call.shape(), gather_dim=call.A.dim() - 1)


def _run(choice: Choice, where: Heap, call: MatmulAllGatherCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    if choice.algorithm == "copy_engine":
        shape = call.shape(where.world_size)
        return launch_kernel(choice, where, OP, lambda made: [made[0].view(shape)])[0]
    product = product_beside(choice, call.A, call.B)
    if choice.algorithm == "one_shot":
        return run_beside(choice, where, _gathered(call, product, group.size()), None)
    gather = AllGatherCall(product, product.dim() - 1, call.group_name)
    return run_all_gather(choice, where, gather, group, op=OP)


def _gradients(grad: Tensor, A: Any, B: Any, transposed: bool, name: str, size: int | None) -> Any:
    own = torch.ops.weft.one_shot_reduce_scatter(grad, "sum", grad.dim() - 1, name, group_size=size)
    return gradients_of_factors(own, A, B, transposed)


MATMUL_ALL_GATHER: Op = Op(
    "fused_matmul_all_gather(Tensor A, Tensor B, str group_name, *, int? group_size=None) -> Tensor",
    record=MatmulAllGatherCall,
    validate=_validate,
    fake=lambda call, group: call.A.new_empty(call.shape(group.size())),
    kernel="matmul_all_gather",
    sends_nothing=lambda call, group: 0 in call.shape(),
    choose=_choose,
    run=_run,
    known_by=lambda call: (None, (call.A, call.B)),
    with_gradient=lambda call: ProductFunction.apply(MATMUL_ALL_GATHER, _gradients, call, *call[:2]),
    flops=matmul_flops,
)
