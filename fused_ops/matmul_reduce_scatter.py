"""fused_matmul_reduce_scatter: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.matmul_reduce_scatter import host
from ..kernels.matmul_reduce_scatter.reference import matmul_reduce_scatter as unfused
from ..symm_mem import Heap, get_timeout
from .plan import Plan, aligned, heap_or_reason, num_sms, on, pays, ran
from .workspaces import matmul_workspace


def run(
    A: Tensor, B: Tensor, reduce_op: str, dim: int, group: ProcessGroup, out_dtype: torch.dtype
) -> Tensor:
    """As the op; the arguments are checked and ``dim`` is not negative."""
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] //= group.size()
    found = heap_or_reason(A, group, empty=0 in shape)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return unfused(A, B, reduce_op, dim, group, out_dtype)
    if A.device.type == "cpu":
        return _on_cpu(found, A, B, reduce_op, dim, out_dtype).view(shape)
    if dim == A.dim() - 1:
        done: Tensor | str = "the last dimension is scattered"
    else:
        done = _on_cuda(found, aligned(_parts(A, dim, group.size())), aligned(B), reduce_op, out_dtype)
    if isinstance(done, str):
        ran(Plan("unfused", done))
        return unfused(A, B, reduce_op, dim, group, out_dtype)
    return done.view(shape)


def _on_cpu(where: Heap, A: Tensor, B: Tensor, reduce_op: str, dim: int, out_dtype: torch.dtype) -> Tensor:
    size = where.world_size
    if dim == A.dim() - 1:
        rows = A.flatten(0, -2)
        parts = [(rows, b) for b in B.chunk(size, 1)]
    else:
        parts = [(a.flatten(0, -2), B) for a in A.chunk(size, dim)]
    m, n = parts[0][0].shape[0], parts[0][1].shape[1]
    workspace = matmul_workspace(where, *host.needs(m, n, A.element_size(), size))
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    return host.matmul_reduce_scatter(workspace, parts, reduce_op, out_dtype)


def _parts(A: Tensor, dim: int, size: int) -> Tensor:
    """A as [L, W, m, K]: rows of part w, for each index in front of the scattered dimension."""
    lead, k = prod(A.shape[:dim]), A.shape[-1]
    return A.reshape(lead, size, A.shape[:-1].numel() // (lead * size), k)


def _on_cuda(where: Heap, parts: Tensor, B: Tensor, reduce_op: str, out_dtype: torch.dtype) -> Tensor | str:
    """The result, or why it is better computed unfused."""
    from ..kernels.matmul_reduce_scatter import on_cuda

    sms = num_sms(B.device)
    choice = on_cuda.choose(parts, B, sms)
    if isinstance(choice, str):
        return choice
    if not pays(choice.pays):
        return "too little is multiplied and scattered"
    with on(B.device):
        workspace = matmul_workspace(where, choice.half_bytes, choice.flags)
        workspace.raise_if_broken(host.OP)
        ran(Plan(choice.algorithm, workspace_bytes=workspace.layout.bytes))
        timeout_ns = int(get_timeout(where.group_name) * 1e9)
        average = reduce_op == "avg"
        return on_cuda.run(choice, workspace, parts, B, sms, timeout_ns, average=average, out_dtype=out_dtype)
