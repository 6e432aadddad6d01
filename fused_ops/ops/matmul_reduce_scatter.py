"""fused_matmul_reduce_scatter: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.matmul_reduce_scatter import host
from ...kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from ...kernels.matmul_reduce_scatter.reference import reference_matmul_reduce_scatter
from ...symm_mem import get_timeout
from ...symm_mem.heap.heap import Heap
from ..dispatch import fast_path as short
from ..dispatch.plan import Plan, aligned, heap_or_reason, num_sms, ran, should_fuse, why_tf32
from ..dispatch.staging import Staging, rows_of
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import matmul_workspace, product_workspace

_WHOLE_TILES = 128  # rows: every tile's height divides it, so that no tile is cut off


def fast_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    dim: int,
    group_name: str,
    out_dtype: torch.dtype | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors, dimension and operation may be anything. A call that names the dtype of its result takes the long way.
    """
    if out_dtype is not None:
        return None
    if dim < 0 and isinstance(A, Tensor):
        dim += A.dim()
    if bias is None and residual is None:
        results = short.run_fast(host.OP, (dim, reduce_op), (A, B), group_name)
    else:
        arguments, terms = _with_terms(dim, reduce_op, bias, residual)
        results = short.run_fast(host.OP, arguments, (A, B, *terms), group_name)
    return None if results is None else results[0]


def _with_terms(
    dim: int, reduce_op: str, bias: Tensor | None, residual: Tensor | None
) -> tuple[tuple[int | str, ...], list[Tensor]]:
    """What such calls are remembered by, and the tensors that are added."""
    terms = [term for term in (bias, residual) if term is not None]
    added = (bias is not None, residual is not None) if terms else ()
    return (dim, reduce_op, *added), terms


def run_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    dim: int,
    group: ProcessGroup,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As the op; the arguments are checked and ``dim`` is not negative."""
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] //= group.size()
    found = heap_or_reason(host.OP, A, group, empty=0 in shape)
    if isinstance(found, str):
        done: Tensor | str = found
    elif A.device.type == "cpu":
        done = _on_cpu(found, A, B, reduce_op, dim, out_dtype, bias, residual).view(shape)
    else:
        done = _on_cuda(found, A, B, reduce_op, dim, shape, out_dtype, bias, residual)
    if isinstance(done, str):
        ran(Plan("unfused", done))
        epilogue = Epilogue(out_dtype, reduce_op == "avg", bias is not None, residual is not None)
        terms = [term for term in (bias, residual) if term is not None]
        return reference_matmul_reduce_scatter(A, B, dim, group, epilogue, terms)
    return done


def _on_cpu(
    where: Heap,
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    dim: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    size = where.world_size
    if dim == A.dim() - 1:
        rows = A.flatten(0, -2)
        parts = [(rows, b) for b in B.chunk(size, 1)]
    else:
        parts = [(a.flatten(0, -2), B) for a in A.chunk(size, dim)]
    m, n = parts[0][0].shape[0], parts[0][1].shape[1]
    workspace = matmul_workspace(where, host.host_scatter_layout(m, n, A.element_size(), size))
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    residual = None if residual is None else residual.reshape(m, n)
    return host.host_matmul_reduce_scatter(workspace, parts, reduce_op, out_dtype, bias, residual)


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


def _on_cuda(
    where: Heap,
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    dim: int,
    shape: list[int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor | str:
    """The result, or why it is better computed unfused."""
    from ...kernels.matmul_reduce_scatter import on_cuda

    split_n, size = dim == A.dim() - 1, where.world_size
    if (reason := why_tf32(A.dtype)) is not None:
        return reason
    staging = Staging()
    parts = staging.take("A", A, lambda x: rows_of(x)[None, None] if split_n else _parts(x, dim, size))
    b = staging.take("B", B)
    epilogue = Epilogue(out_dtype, reduce_op == "avg", bias is not None, residual is not None)
    arguments, given = _with_terms(dim, reduce_op, bias, residual)
    call = ScatterKernelCall(parts, b, num_sms(B.device), epilogue, given, split_n)
    choice = on_cuda.choose_scatter_kernel(call, size)
    if isinstance(choice, str):
        return choice
    if not should_fuse(choice.profitable):
        return "too little is multiplied and scattered"
    with in_stream_order(b.device):
        staging.copy()
        call = replace(call, terms=[aligned(term.contiguous()) for term in given])
        choice, chosen = on_cuda.tuned_scatter(choice, where, call)
        workspace = product_workspace(where, choice)
        workspace.raise_if_broken(None if choice.algorithm == "one_shot" else host.OP)  # that says it itself
        plan = Plan(choice.algorithm, staging.reason, workspace.layout.bytes, chosen)
        ran(plan)
        timeout_ns = int(get_timeout(where.group_name) * 1e9)
        out = on_cuda.launch_matmul_reduce_scatter(choice, workspace, call, timeout_ns).view(shape)
    launcher = on_cuda.scatter_launcher(choice, workspace, epilogue)
    if launcher is not None and out_dtype == A.dtype:
        tensors, used = (A, B, *given), (parts, b, *call.terms)
        short.remember_call(
            host.OP, arguments, tensors, used, [out], workspace, launcher, plan, profitable=choice.profitable
        )
    return out
