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
from ...dispatch import launch_cache
from ...dispatch.choice import Choice, KernelUse, choose_kernel, launch_kernel, on_host
from ...dispatch.plan import preferred_kernel
from ...dispatch.staging import Staging, in_rows_or_columns, rows_of
from ...dispatch.stand_alone import KINDS, StandAlone, run_alone
from ...dispatch.stream_order import in_stream_order
from .. import op
from ..all_gather import choose_gather_on_cuda, gather_by_choice
from ..op import Op
from .matmul_all_to_all import product_flops

_ops = torch.ops.weft


class MatmulAllGatherCall(NamedTuple):
    A: Tensor
    B: Tensor
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.A, self.B]

    def shape(self, ranks: int = 1) -> list[int]:
        """That of so many ranks' products side by side."""
        return [*self.A.shape[:-1], self.B.shape[1] * ranks]


def _validate(call: MatmulAllGatherCall) -> tuple[MatmulAllGatherCall, ProcessGroup]:
    group, A = resolve_group(call.group_name), call.A
    validation.float_dtype("A", A)
    if A.dim() < 2:
        raise ValueError(f"A: has {A.dim()} dimensions, must have 2 or more")
    validation.validate_matrix("B", call.B, A.shape[-1], A, "A")
    return call, group


def fast_matmul_all_gather(A: Tensor, B: Tensor, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before; else None, and nothing happened. All may be anything."""
    results = launch_cache.launch_again(OP, None, (A, B), group_name)
    return None if results is None else results[0]


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
    choice = choose_gather_on_cuda(_gathered(call, A, size), group)
    if choice.is_unfused:
        return choice
    return replace(choice, algorithm="one_shot", predicted_us=estimate_gathered_after_us(used.problem(size)))


def _gathered(call: MatmulAllGatherCall, product: Tensor, size: int) -> StandAlone:
    """The gather of the product, or of one of its dtype and device."""
    return StandAlone(OP, OP, None, [product], call.shape(size), call.shape(), gather_dim=call.A.dim() - 1)


def run_matmul_all_gather(
    choice: Choice, where: Heap, call: MatmulAllGatherCall, group: ProcessGroup
) -> Tensor:
    """As the op; the call is what validation returns."""
    A, B, dim = call.A, call.B, call.A.dim() - 1
    if choice.algorithm == "copy_engine":
        return _by_copy_engines(choice, where, call)
    if choice.algorithm == "host":  # as the kernels: torch's own may add up in 16 bits
        product = (A.float() @ B.float()).to(A.dtype)
    else:
        product = op.matmul_without_autocast(A, B)
    if choice.algorithm != "one_shot":
        return gather_by_choice(choice, where, product, dim, group, OP)
    done = launch_cache.launch_again(OP, None, (product,), group.group_name, KINDS)
    return done[0] if done is not None else run_alone(choice, where, _gathered(call, product, group.size()))


def _by_copy_engines(choice: Choice, where: Heap, call: MatmulAllGatherCall) -> Tensor:
    from ....kernels.matmul_all_gather.copied_products import COPIED_STEPS

    how: KernelUse = choice.how
    with in_stream_order(how.call.b.device):
        how.staging.copy()
        (made,), remember = launch_kernel(COPIED_STEPS, choice, where, how.call, OP)
    out: Tensor = made.view(call.shape(where.world_size))
    remember((None, call.tensors), [out])
    return out


def _fake(call: MatmulAllGatherCall, group: ProcessGroup) -> Tensor:
    return call.A.new_empty(call.shape(group.size()))


class MatmulAllGatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MatmulAllGatherCall, A: Tensor, B: Tensor) -> Tensor:
        _, of_A, of_B = ctx.needs_input_grad
        done: Tensor = MATMUL_ALL_GATHER.run_below_autograd(call)
        ctx.name, ctx.size, ctx.transposed = call.group_name, call.group_size, op.is_transposed_matrix(B)
        ctx.save_for_backward(A if of_B else None, B if of_A else None)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        A, B = ctx.saved_tensors
        own = _ops.one_shot_reduce_scatter(grad, "sum", grad.dim() - 1, ctx.name, group_size=ctx.size)
        grad_A = None if B is None else op.matmul_without_autocast(own, B.t())
        grad_B = None if A is None else op.gradient_of_matrix(A, own, ctx.transposed)
        return None, grad_A, grad_B


MATMUL_ALL_GATHER = Op(
    "fused_matmul_all_gather(Tensor A, Tensor B, str group_name, *, int? group_size=None) -> Tensor",
    record=MatmulAllGatherCall,
    validate=_validate,
    fake=_fake,
    kernel="matmul_all_gather",
    sends_nothing=lambda call, group: 0 in call.shape(),
    choose=_choose,
    run=run_matmul_all_gather,
    fast=lambda call: fast_matmul_all_gather(*call[:3]),
    known_by=lambda call, group: (None, call.tensors),
    with_gradient=lambda call: MatmulAllGatherFunction.apply(call, call.A, call.B),
    flops=product_flops,
)
