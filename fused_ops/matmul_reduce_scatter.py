"""fused_matmul_reduce_scatter: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.matmul_reduce_scatter import host
from ..kernels.matmul_reduce_scatter.reference import matmul_reduce_scatter as unfused
from ..symm_mem import Heap, get_timeout
from .plan import Plan, aligned, heap_or_reason, num_sms, pays, ran
from .workspaces import matmul_workspace


def run(A: Tensor, B: Tensor, reduce_op: str, dim: int, group: ProcessGroup) -> Tensor:
    """As the op; the arguments are checked and ``dim`` is not negative."""
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] //= group.size()
    found = heap_or_reason(A, group, empty=0 in shape)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return unfused(A, B, reduce_op, dim, group)
    if A.device.type == "cpu":
        return _on_cpu(found, A, B, reduce_op, dim).view(shape)
    parts = None if dim == A.dim() - 1 else aligned(_parts(A, dim, group.size()))
    B = aligned(B)
    reason = "the last dimension is scattered" if parts is None else _why_not_on_cuda(parts, B)
    if parts is None or reason is not None:
        ran(Plan("unfused", reason or ""))
        return unfused(A, B, reduce_op, dim, group)
    return _on_cuda(found, parts, B, reduce_op).view(shape)


def _on_cpu(where: Heap, A: Tensor, B: Tensor, reduce_op: str, dim: int) -> Tensor:
    size = where.world_size
    if dim == A.dim() - 1:
        rows = A.flatten(0, -2)
        parts = [(rows, b) for b in B.chunk(size, 1)]
    else:
        parts = [(a.flatten(0, -2), B) for a in A.chunk(size, dim)]
    m, n = parts[0][0].shape[0], parts[0][1].shape[1]
    workspace = matmul_workspace(where, *host.needs(m, n, A.element_size(), size))
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    return host.matmul_reduce_scatter(workspace, parts, reduce_op)


def _parts(A: Tensor, dim: int, size: int) -> Tensor:
    """A as [L, W, m, K]: rows of part w, for each index in front of the scattered dimension."""
    lead, k = prod(A.shape[:dim]), A.shape[-1]
    return A.reshape(lead, size, A.shape[:-1].numel() // (lead * size), k)


def _why_not_on_cuda(parts: Tensor, B: Tensor) -> str | None:
    from ..kernels.matmul_reduce_scatter.triton_kernel import supports

    if (reason := supports(parts, B)) is not None:
        return reason
    if not pays(parts.shape[0] * parts.shape[2] >= 64):
        return "too few rows for tiles"
    return None


def _on_cuda(where: Heap, parts: Tensor, B: Tensor, reduce_op: str) -> Tensor:
    from ..kernels.device.launch import compiling
    from ..kernels.matmul_reduce_scatter.configs import choose, flags_per_rank
    from ..kernels.matmul_reduce_scatter.triton_kernel import MatmulReduceScatter

    sms, size = num_sms(B.device), where.world_size
    lead, _, m, k = parts.shape
    n, average = B.shape[1], reduce_op == "avg"
    with torch.cuda.device(B.device):
        config = choose(m, n, k, size, parts.dtype, sms, lead)
        out = parts.new_empty(lead, m, n)
        workspace = matmul_workspace(where, size * out.nbytes, flags_per_rank(m, n, config, lead))
        workspace.raise_if_broken(host.OP)
        ran(Plan("tma_store", workspace_bytes=workspace.layout.bytes))
        key = (host.OP, parts.shape, parts.stride(), parts.dtype, B.shape, B.stride(), average, config)
        kernel = workspace.prepared.get(key)
        timeout_ns = int(get_timeout(where.group_name) * 1e9)
        if kernel is None:
            kernel = MatmulReduceScatter(workspace, parts, B, config, average=average, num_sms=sms)

            def compile_it() -> None:
                with compiling():
                    kernel.launch(0, parts, B, out, timeout_ns=timeout_ns)

            # Not the strides: of those each rank may have others.
            where.prepare(host.OP, (host.OP, parts.shape, n, parts.dtype, average, config, sms), compile_it)
            workspace.prepared[key] = kernel
        kernel.launch(workspace.next_half(), parts, B, out, timeout_ns=timeout_ns)
    return out
