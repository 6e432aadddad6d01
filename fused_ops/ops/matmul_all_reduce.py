"""fused_matmul_all_reduce: a kernel for few rows, one for large products, and for others cuBLAS and an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.device_spec import device_spec_of
from ...kernels.device.gemm.gemm_tiles import matmul_us
from ...kernels.matmul_all_reduce import OP, configs
from ...kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from ...symm_mem import resolve_group
from ...symm_mem.heap.heap import Heap
from ...symm_mem.workspace import Workspace
from .. import validation
from ..dispatch import plan
from ..dispatch.all_reduces import NotYet, choose_sum_on_cuda
from ..dispatch.choice import (
    Choice,
    KernelUse,
    choose_kernel,
    host_or,
    launch_exchange,
    launch_kernel,
    prepare_kernel,
)
from ..dispatch.launch_cache import PreparedKernel, launch_again, remember_call
from ..dispatch.plan import num_sms, on, should_fuse
from ..dispatch.staging import Staging, in_rows_or_columns, rows_of
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import ALL_REDUCE, AROUND_MATMULS
from . import all_reduce
from .gradients import ProductFunction, gradients_of_factors
from .matmul_reduce_scatter import matmul_flops
from .op import Op

_ALL = (*AROUND_MATMULS, ALL_REDUCE)


class MatmulAllReduceCall(NamedTuple):
    A: Tensor
    B: Tensor
    reduce_op: str
    group_name: str
    group_size: int | None = None


def _validate(call: MatmulAllReduceCall) -> tuple[MatmulAllReduceCall, ProcessGroup]:
    group, A = resolve_group(call.group_name), call.A
    validation.left_operand("A", A)
    validation.validate_matrix("B", call.B, A.shape[-1], A, "A")
    validation.reduction(call.reduce_op)
    return call, group


@dataclass(frozen=True)
class _MatmulThenSum:
    """cuBLAS's product, and an all-reduce of it where it lies: what calls like one before are made of."""

    workspace: Workspace[Any]  # the all-reduce's
    kernel: Any  # an AllReduceLauncher

    def call(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], timeout_ns: int, stream: int
    ) -> None:
        """As ``launch_cache.Caller``."""
        (A, B), (out,) = tensors, results
        if out.dim() == 2:
            torch.mm(A, B, out=out)
        else:
            torch.mm(A.flatten(0, -2), B, out=out.view(-1, out.shape[-1]))
        self.workspace.raise_if_broken(OP, inside=3, grids=self.kernel.grids)
        address = (out.data_ptr(),)
        try:
            self.kernel.launch(0, address, address, timeout_ns, stream)
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise


def fast_matmul_all_reduce(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors and operation may be anything.
    """
    kinds = AROUND_MATMULS if plan._forced == "fused" else _ALL
    results = launch_again(OP, reduce_op, (A, B), group_name, kinds)
    return None if results is None else results[0]


def _sizes(A: Tensor, B: Tensor) -> tuple[int, int, int]:
    """M, N, K."""
    return A.shape[:-1].numel(), B.shape[1], A.shape[-1]


@dataclass(frozen=True)
class _FewRows:
    """The kernel for few rows, and the operands [M, K] and [K, N] as it takes them."""

    config: configs.MatmulAllReduceConfig
    a: Tensor
    b: Tensor
    staging: Staging
    profitable: bool


def _choose_on_cuda(call: MatmulAllReduceCall, group: ProcessGroup) -> Choice:
    chosen = _few_rows(call, group) or _one_kernel(call, group)
    if chosen is not None:
        return chosen
    A, B = call.A, call.B
    m, n, k = _sizes(A, B)
    of_sum = choose_sum_on_cuda(NotYet(A.device, A.dtype, m * n * A.element_size()), call.reduce_op, group)
    us = of_sum.predicted_us
    if us is not None:
        us = us + matmul_us(m, n, k, device_spec_of(A.device)) if A.element_size() == 2 else None
    return replace(of_sum, algorithm="two_kernels", predicted_us=us)


def _few_rows(call: MatmulAllReduceCall, group: ProcessGroup) -> Choice | None:
    """By the kernel for few rows; None if it cannot take the call, or another way is faster."""
    A, B, size = call.A, call.B, group.size()
    m, n, k = _sizes(A, B)
    config = configs.choose_matmul_all_reduce(m, n, num_sms(A.device))
    if config is None:
        return None
    profitable = configs.few_rows_kernel_is_profitable(config, n, k)
    if not should_fuse(profitable):
        return None
    from ...kernels.matmul_all_reduce import cuda_kernel

    staging = Staging()
    a, b = staging.take("A", A, rows_of), staging.take("B", B, fits=in_rows_or_columns)
    if cuda_kernel.why_no_few_rows_kernel(a, b) is not None:
        return None
    ranks = size, group.rank()
    return Choice(
        "one_shot",
        staging.reason,
        ALL_REDUCE,
        config.layout(m, size),
        predicted_us=configs.estimate_few_rows_us(m, n, k, size, device_spec_of(A.device)),
        programs=lambda: [cuda_kernel.few_rows_program(a, b, call.reduce_op, config, ranks)],
        how=_FewRows(config, a, b, staging, profitable),
    )


def _one_kernel(call: MatmulAllReduceCall, group: ProcessGroup) -> Choice | None:
    """By the kernel for large products; None if it cannot take the call, or a product and an all-reduce are faster."""
    from ...kernels.matmul_reduce_scatter import on_cuda

    staging = Staging()
    a = staging.take("A", call.A, rows_of)
    b = staging.take("B", call.B, fits=in_rows_or_columns)
    epilogue = Epilogue(a.dtype, call.reduce_op == "avg", to_all=True)
    used = ScatterKernelCall(a, b, num_sms(a.device), epilogue)
    choice = choose_kernel(on_cuda.SCATTER_STEPS, used, staging, group, "")
    return None if choice.is_unfused else choice


def _run(choice: Choice, where: Heap, call: MatmulAllReduceCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    if choice.algorithm not in ("host", "unfused"):
        return _on_cuda(choice, where, call)
    if choice.algorithm == "host":
        choice.begin_on(where, OP)
    # Between CPU ranks as the kernels, which round once.
    dtype = torch.float32 if choice.algorithm == "host" else call.A.dtype
    product = call.A.to(dtype) @ call.B.to(dtype)
    of_product = all_reduce.AllReduceCall(product, call.reduce_op, call.group_name)
    return all_reduce.run_by_choice(choice, where, of_product, group, op=OP).to(call.A.dtype)


def _on_cuda(choice: Choice, where: Heap, call: MatmulAllReduceCall) -> Tensor:
    with on(call.A.device):
        if isinstance(choice.how, _FewRows):
            return _run_few_rows(choice, where, call)
        if isinstance(choice.how, KernelUse):
            return _run_one_kernel(choice, where, call)
        return _run_two_kernels(choice, where, call)


def _run_two_kernels(choice: Choice, where: Heap, call: MatmulAllReduceCall) -> Tensor:
    A, B, reduce_op = call.A, call.B, call.reduce_op
    a = A.flatten(0, -2)
    out = a.new_empty(a.shape[0], B.shape[1])
    torch.mm(a, B, out=out)
    workspace, kernel, both, _ = all_reduce.all_reduce_on_cuda(choice, where, (out, out), reduce_op, OP)
    shaped = out.view(*A.shape[:-1], B.shape[1])
    ready = PreparedKernel(workspace, _MatmulThenSum(workspace, kernel), both)
    remember_call(OP, choice.known, (A, B), [shaped], ready, alignment=1)
    return shaped


def _run_few_rows(choice: Choice, where: Heap, call: MatmulAllReduceCall) -> Tensor:
    from ...kernels.matmul_all_reduce import cuda_kernel

    how: _FewRows = choice.how
    A, reduce_op, config, a, b = call.A, call.reduce_op, how.config, how.a, how.b
    with in_stream_order(A.device):
        how.staging.copy()
        ready = prepare_kernel(
            *(choice, where, OP, (OP, a.shape, a.stride(), b.shape, b.stride(), a.dtype, reduce_op, config)),
            lambda place: cuda_kernel.MatmulAllReduceLauncher(place, a, b, reduce_op, config),
            same=(OP, a.shape, b.shape, a.dtype, reduce_op, config),
        )
        out = a.new_empty(a.shape[0], b.shape[1])
        launch_exchange(ready, OP, where, (a, b), (out,))
    shaped = out.view(*A.shape[:-1], b.shape[1])
    remember_call(OP, choice.known, (a, b), [shaped], ready._replace(profitable=how.profitable))
    return shaped


def _run_one_kernel(choice: Choice, where: Heap, call: MatmulAllReduceCall) -> Tensor:
    shape = *call.A.shape[:-1], call.B.shape[1]

    return launch_kernel(
        *(choice, where, OP, lambda made: [made[0].view(shape)]),
        lambda used: replace(used, a=used.a.unsqueeze(0).unsqueeze(0)),  # one part of one batch
    )[0]


def _gradients(grad: Tensor, A: Any, B: Any, transposed: bool, reduce_op: str, *of_group: Any) -> Any:
    name, size = of_group
    total = torch.ops.weft.one_shot_all_reduce(grad, reduce_op, name, group_size=size)
    return gradients_of_factors(total, A, B, transposed)


MATMUL_ALL_REDUCE: Op = Op(
    "fused_matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    record=MatmulAllReduceCall,
    validate=_validate,
    fake=lambda call, group: call.A.new_empty((*call.A.shape[:-1], call.B.shape[1])),
    kernel="matmul_all_reduce",
    sends_nothing=lambda call, group: 0 in (*call.A.shape[:-1], call.B.shape[1]),
    choose=host_or(lambda call, group: 4 * prod(_sizes(call.A, call.B)[:2]), _choose_on_cuda),
    run=_run,
    known_by=lambda call: (call.reduce_op, (call.A, call.B)),
    again=lambda call: fast_matmul_all_reduce(*call[:4]),
    with_gradient=lambda call: ProductFunction.apply(MATMUL_ALL_REDUCE, _gradients, call, *call[:2]),
    flops=matmul_flops,
    own_dims={"A": (-1,), "B": (0,)},
)
