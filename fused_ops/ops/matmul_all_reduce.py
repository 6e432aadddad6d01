"""fused_matmul_all_reduce: a kernel for few rows, one for large products, and for others cuBLAS and an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.device_spec import device_spec_of
from ...kernels.device.gemm.gemm_tiles import matmul_us
from ...kernels.device.tuning.choice import make_together
from ...kernels.matmul_all_reduce import host
from ...kernels.matmul_all_reduce.reference import reference_matmul_all_reduce
from ...symm_mem import resolve_group
from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.timeouts import timeout_in_ns
from ...symm_mem.workspace import Workspace
from .. import validation
from ..dispatch import fast_path, plan, planning
from ..dispatch.plan import Plan, heap_or_reason, num_sms, on, ran, should_fuse
from ..dispatch.staging import Staging, in_rows_or_columns, rows_of
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import (
    ALL_REDUCE,
    AROUND_MATMULS,
    matmul_workspace,
    push_workspace,
    workspace_of_choice,
)
from . import all_reduce, op
from .matmul_reduce_scatter import matmul_flops
from .op import Op

_ALL = (*AROUND_MATMULS, ALL_REDUCE)


class MatmulAllReduceCall(NamedTuple):
    A: Tensor
    B: Tensor
    reduce_op: str
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.A, self.B]


def _validate(call: MatmulAllReduceCall) -> tuple[MatmulAllReduceCall, ProcessGroup]:
    group, A = resolve_group(call.group_name), call.A
    if A.dim() < 2:
        raise ValueError(f"A: has {A.dim()} dimensions, must have 2 or more")
    validation.float_dtype("A", A)
    validation.validate_matrix("B", call.B, A.shape[-1], A, "A")
    validation.reduction(call.reduce_op)
    return call, group


@dataclass(frozen=True)
class _MatmulThenSum:
    """cuBLAS's product, and an all-reduce of it where it lies: what calls like one before are made of."""

    workspace: Workspace[Any]  # the all-reduce's
    kernel: Any  # an AllReduce

    def call(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], timeout_ns: int, stream: int
    ) -> None:
        """As ``fast_path.Caller``."""
        (A, B), (out,) = tensors, results
        if out.dim() == 2:
            torch.mm(A, B, out=out)
        else:
            torch.mm(A.flatten(0, -2), B, out=out.view(-1, out.shape[-1]))
        self.workspace.raise_if_broken(host.OP, inside=3, grids=self.kernel.grids)
        address = out.data_ptr()
        try:
            self.kernel.launch(address, address, timeout_ns, stream)
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise


def fast_matmul_all_reduce(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors and operation may be anything.
    """
    kinds = AROUND_MATMULS if plan._forced == "fused" else _ALL
    results = fast_path.run_fast(host.OP, reduce_op, (A, B), group_name, kinds)
    return None if results is None else results[0]


def _in_two(sum_ran: Plan, A: Tensor, B: Tensor) -> Plan:
    """How the product and the all-reduce ran, the latter so."""
    if sum_ran.algorithm != "push":
        return sum_ran
    us = sum_ran.predicted_us
    if us is not None:
        of_16_bits = A.element_size() == 2
        us = us + matmul_us(*_sizes(A, B), device_spec_of(A.device)) if of_16_bits else None
    return replace(sum_ran, algorithm="two_kernels", predicted_us=us)


def _sizes(A: Tensor, B: Tensor) -> tuple[int, int, int]:
    """M, N, K."""
    return A.shape[:-1].numel(), B.shape[1], A.shape[-1]


def _remember(A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup, out: Tensor) -> None:
    """Such a call was a product and an all-reduce."""
    found = all_reduce.made_before(out, reduce_op, group.group_name)
    if found is not None:
        made = fast_path.LaunchedCall(host.OP, reduce_op, (A, B), (A, B), [out])
        caller = _MatmulThenSum(found.workspace, found.kernel)
        fast_path.remember_call(made, found.workspace, caller, _in_two(found.plan, A, B), profitable=True)


def run_matmul_all_reduce(A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup) -> Tensor:
    """As the op; the arguments are checked."""
    shape = (*A.shape[:-1], B.shape[1])
    found = heap_or_reason(host.OP, A, group, empty=0 in shape)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return reference_matmul_all_reduce(A, B, reduce_op, group)
    if A.device.type == "cpu":
        a = A.flatten(0, -2)
        layout = host.host_matmul_all_reduce_layout(
            a.shape[0], B.shape[1], A.element_size(), found.world_size
        )
        workspace = matmul_workspace(found, layout)
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        return host.host_matmul_all_reduce(workspace, a, B, reduce_op).view(shape)
    return _on_cuda(found, A, B, reduce_op, group).view(shape)


def _on_cuda(where: Heap, A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup) -> Tensor:
    """The result, [M, N]."""
    with on(A.device):
        out = _of_few_rows(where, A, B, reduce_op)
        if out is None:
            out = _in_one_kernel(where, A, B, reduce_op)
        if out is None:
            a = A.flatten(0, -2)
            out = a.new_empty(a.shape[0], B.shape[1])
            torch.mm(a, B, out=out)
            try:
                all_reduce.in_place(out, reduce_op, group, host.OP)
            except planning.Planned as e:
                raise planning.Planned(_in_two(e.plan, A, B)) from None
            plan.this_thread.plan = _in_two(plan.last_plan(), A, B)
            _remember(A, B, reduce_op, group, out.view(*A.shape[:-1], B.shape[1]))
    return out


def _of_few_rows(where: Heap, A: Tensor, B: Tensor, reduce_op: str) -> Tensor | None:
    """The result, [M, N], by the kernel for few rows; None if it cannot take the call, or another way is faster."""
    from ...kernels.matmul_all_reduce import configs, cuda_kernel

    m, n, k = _sizes(A, B)
    config = configs.choose_matmul_all_reduce(m, n, num_sms(A.device))
    if config is None or not should_fuse(configs.few_rows_kernel_is_profitable(config, n, k)):
        return None
    staging = Staging()
    a, b = staging.take("A", A, rows_of), staging.take("B", B, fits=in_rows_or_columns)
    if cuda_kernel.why_no_few_rows_kernel(a, b) is not None:
        return None
    with in_stream_order(A.device):
        staging.copy()
        workspace = push_workspace(where, ALL_REDUCE, config.layout(m, where.world_size))
        key = (host.OP, a.shape, a.stride(), b.shape, b.stride(), a.dtype, reduce_op, config)
        us = configs.estimate_few_rows_us(m, n, k, where.world_size, device_spec_of(A.device))
        fused = Plan("one_shot", staging.reason, workspace.layout.bytes, predicted_us=us)
        planning.stop(fused)
        kernel = workspace.prepared.get(key)
        if kernel is None:
            same = (host.OP, a.shape, b.shape, a.dtype, reduce_op, config)
            kernel = make_together(
                *(workspace, host.OP, key, same),
                lambda: cuda_kernel.MatmulAllReduceLauncher(workspace, a, b, reduce_op, config),
            )
        ran(fused)
        workspace.raise_if_broken(host.OP, grids=kernel.grids)
        out = a.new_empty(m, n)
        timeout_ns = timeout_in_ns(where.group_name)
        operands = a.data_ptr(), b.data_ptr()
        kernel.launch(0, operands, (out.data_ptr(),), timeout_ns, current_stream_of(a))
    shaped = out.view(*A.shape[:-1], n)
    made = fast_path.LaunchedCall(host.OP, reduce_op, (A, B), (a, b), [shaped])
    profitable = configs.few_rows_kernel_is_profitable(config, n, k)
    fast_path.remember_call(made, workspace, kernel, fused, profitable=profitable, grids=kernel.grids)
    return out


def _in_one_kernel(where: Heap, A: Tensor, B: Tensor, reduce_op: str) -> Tensor | None:
    """The result, [M, N]; None if the kernel cannot take the call, or a product and an all-reduce are faster."""
    from ...kernels.matmul_reduce_scatter import to_all
    from ...kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall

    staging = Staging()
    a, b = staging.take("A", A, rows_of), staging.take("B", B, fits=in_rows_or_columns)
    call = ScatterKernelCall(a, b, num_sms(A.device), Epilogue(a.dtype, reduce_op == "avg", to_all=True))
    choice = to_all.choose_sum_to_all(call, where.world_size)
    if isinstance(choice, str) or not should_fuse(choice.profitable):
        return None
    with in_stream_order(A.device):
        staging.copy()
        workspace = workspace_of_choice(where, choice)
        workspace.raise_if_broken(host.OP)
        us = choice.predicted_us
        fused = Plan(choice.algorithm, staging.reason, workspace.layout.bytes, predicted_us=us)
        ran(fused)
        timeout_ns = timeout_in_ns(where.group_name)
        out, launcher = to_all.launch_sum_to_all(choice, workspace, call, timeout_ns, host.OP)
    shaped = out.view(*A.shape[:-1], B.shape[1])
    made = fast_path.LaunchedCall(host.OP, reduce_op, (A, B), (a, b), [shaped])
    fast_path.remember_call(made, workspace, launcher, fused, profitable=choice.profitable)
    return out


def _fake(call: MatmulAllReduceCall, group: ProcessGroup) -> Tensor:
    return call.A.new_empty((*call.A.shape[:-1], call.B.shape[1]))


class MatmulAllReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: MatmulAllReduceCall, A: Tensor, B: Tensor) -> Tensor:
        _, of_A, of_B = ctx.needs_input_grad
        ctx.save_for_backward(A if of_B else None, B if of_A else None)
        ctx.reduce_op, ctx.group_name, ctx.group_size = call.reduce_op, call.group_name, call.group_size
        done: Tensor = MATMUL_ALL_REDUCE.run_below_autograd(call)
        ctx.transposed = op.is_transposed_matrix(B)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        A, B = ctx.saved_tensors
        total = torch.ops.weft.one_shot_all_reduce(
            grad, ctx.reduce_op, ctx.group_name, group_size=ctx.group_size
        )
        grad_A = op.matmul_without_autocast(total, B.t()) if ctx.needs_input_grad[1] else None
        grad_B = op.gradient_of_matrix(A, total, ctx.transposed) if ctx.needs_input_grad[2] else None
        return None, grad_A, grad_B


MATMUL_ALL_REDUCE = Op(
    "fused_matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    MatmulAllReduceCall,
    _validate,
    _fake,
    lambda call, group: run_matmul_all_reduce(call.A, call.B, call.reduce_op, group),
    lambda call: fast_matmul_all_reduce(*call[:4]),
    lambda call: MatmulAllReduceFunction.apply(call, *call.tensors),
    flops=matmul_flops,
)
