"""fused_matmul_reduce_scatter: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.matmul_reduce_scatter import host
from ...kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from ...kernels.matmul_reduce_scatter.reference import reference_matmul_reduce_scatter
from ...symm_mem.heap.heap import Heap
from ...symm_mem.timeouts import timeout_in_ns
from ..dispatch import fast_path
from ..dispatch.plan import (
    Plan,
    aligned,
    heap_or_reason,
    num_sms,
    preferred_kernel,
    ran,
    should_fuse,
    why_tf32,
)
from ..dispatch.staging import Staging, in_rows_or_columns
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import matmul_workspace, workspace_of_choice
from .calls import MatmulReduceScatterCall

_WHOLE_TILES = 128  # rows: every tile's height divides it, so that no tile is cut off


def fast_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    dim: int,
    group_name: str,
    terms: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor | None:
    """As the op with a result of A's dtype, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors, dimension and operation may be anything.

    Args:
        terms: bias and residual.
    """
    if dim < 0 and isinstance(A, Tensor):
        dim += A.dim()
    bias, residual = terms
    if bias is None and residual is None:
        results = fast_path.run_fast(host.OP, (dim, reduce_op), (A, B), group_name)
    else:
        arguments = _arguments(dim, reduce_op, bias, residual)
        added = [term for term in terms if term is not None]
        results = fast_path.run_fast(host.OP, arguments, (A, B, *added), group_name)
    return None if results is None else results[0]


def fast_sum_of_matmuls_reduce_scatter(call: MatmulReduceScatterCall) -> Tensor | None:
    """The same of a call with further factors."""
    dim = call.scatter_dim + call.A.dim() if call.scatter_dim < 0 else call.scatter_dim
    arguments = _arguments(dim, call.reduce_op, call.bias, call.residual, len(call.more or ()))
    results = fast_path.run_fast(host.OP, arguments, (*call.factors, *call.terms), call.group_name)
    return None if results is None else results[0]


def _arguments(
    dim: int, reduce_op: str, bias: Tensor | None, residual: Tensor | None, more: int = 0
) -> tuple[int | str, ...]:
    """What such calls are remembered by."""
    if bias is None and residual is None and not more:
        return dim, reduce_op
    return dim, reduce_op, bias is not None, residual is not None, *(more,) * (more > 0)


def run_matmul_reduce_scatter(call: MatmulReduceScatterCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    A, shape = call.A, call.local_shape(group.size())
    found = heap_or_reason(host.OP, A, group, empty=0 in shape)
    if isinstance(found, str):
        done: Tensor | str = found
    elif A.device.type == "cpu":
        call = call.stacked
        done = _on_cpu(found, call).view(shape)
    else:
        done = _on_cuda(found, call)
    if isinstance(done, str):
        ran(Plan("unfused", done))
        call = call.stacked
        return reference_matmul_reduce_scatter(
            call.A, call.B, call.scatter_dim, group, _epilogue(call), call.terms
        )
    return done


def _epilogue(call: MatmulReduceScatterCall) -> Epilogue:
    average, bias, residual = call.reduce_op == "avg", call.bias is not None, call.residual is not None
    return Epilogue(call.out_dtype or call.A.dtype, average, bias, residual)


def _on_cpu(where: Heap, call: MatmulReduceScatterCall) -> Tensor:
    A, B, size = call.A, call.B, where.world_size
    if call.scatter_dim == A.dim() - 1:
        rows = A.flatten(0, -2)
        parts = [(rows, b) for b in B.chunk(size, 1)]
    else:
        parts = [(a.flatten(0, -2), B) for a in A.chunk(size, call.scatter_dim)]
    m, n = parts[0][0].shape[0], parts[0][1].shape[1]
    workspace = matmul_workspace(where, host.host_scatter_layout(m, n, A.element_size(), size))
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    residual = None if call.residual is None else call.residual.reshape(m, n)
    how = call.reduce_op, call.out_dtype or A.dtype
    return host.host_matmul_reduce_scatter(workspace, parts, *how, call.bias, residual)


def _parts(A: Tensor, dim: int, size: int) -> Tensor:
    """A as [L, W, m, K]: rows of part w, for each index in front of the scattered dimension.

    Where nothing is in front of it, L may be what is behind it, but for the last rows: they are then all that must lie
    evenly. Asked of the shape, never of the strides: L and m must be the same on all ranks.

    Raises:
        RuntimeError: A does not lie so that this is a view of it.
    """
    lead, k, m = prod(A.shape[:dim]), A.shape[-1], A.shape[-2]
    if lead == 1 and dim < A.dim() - 2 and m and m % _WHOLE_TILES == 0:
        return A.view(size, A.shape[:-2].numel() // size, m, k).transpose(0, 1)
    return A.view(lead, size, A.shape[:-1].numel() // (lead * size), k)


def _on_cuda(where: Heap, call: MatmulReduceScatterCall) -> Tensor | str:
    """The result, or why it is better computed unfused."""
    from ...kernels.matmul_reduce_scatter import on_cuda

    A, B, dim, size = call.A, call.B, call.scatter_dim, where.world_size
    split_n = dim == A.dim() - 1
    if (reason := why_tf32(A.dtype)) is not None:
        return reason
    staging = Staging()

    def taken(name: str, factor: Tensor, is_B: int) -> Tensor:
        if is_B:
            return staging.take(name, factor, fits=in_rows_or_columns)
        if split_n:
            return staging.take(name, factor, lambda x: x.view(1, 1, x.shape[:-1].numel(), x.shape[-1]))
        return staging.take(name, factor, lambda x: _parts(x, dim, size))

    parts, b = taken("A", A, 0), taken("B", B, 1)
    more = [taken(f"more[{i}]", factor, i % 2) for i, factor in enumerate(call.more or ())]
    epilogue = _epilogue(call)
    kernel_call = ScatterKernelCall(
        parts, b, num_sms(B.device), epilogue, call.terms, split_n, more, preferred_kernel()
    )
    if not on_cuda.adds_products(kernel_call, size):
        return _on_cuda(where, call.stacked)
    choice = on_cuda.choose_scatter_kernel(kernel_call, size)
    if isinstance(choice, str):
        return choice
    if not should_fuse(choice.profitable):
        return "too little is multiplied and scattered"
    with in_stream_order(b.device):
        staging.copy()
        kernel_call = replace(kernel_call, terms=[aligned(term.contiguous()) for term in call.terms])
        choice, chosen = on_cuda.tuned_scatter(choice, where, kernel_call)
        workspace = workspace_of_choice(where, choice)
        workspace.raise_if_broken(None if choice.algorithm == "one_shot" else host.OP)  # that says it itself
        plan = Plan(choice.algorithm, staging.reason, workspace.layout.bytes, chosen, choice.predicted_us)
        ran(plan)
        timeout_ns = timeout_in_ns(where.group_name)
        out = on_cuda.launch_matmul_reduce_scatter(choice, workspace, kernel_call, timeout_ns)
        out = out.view(call.local_shape(size))
    launcher = on_cuda.scatter_launcher(choice, workspace, kernel_call)
    if launcher is not None and epilogue.out_dtype == A.dtype:
        arguments = _arguments(dim, call.reduce_op, call.bias, call.residual, len(more))
        given, used = (*call.factors, *call.terms), (*kernel_call.factors, *kernel_call.terms)
        made = fast_path.LaunchedCall(host.OP, arguments, given, used, [out])
        fast_path.remember_call(made, workspace, launcher, plan, profitable=choice.profitable)
    return out
