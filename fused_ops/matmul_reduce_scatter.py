"""fused_matmul_reduce_scatter: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.matmul_reduce_scatter import host
from ..kernels.matmul_reduce_scatter.reference import matmul_reduce_scatter as unfused
from ..symm_mem import Heap, get_timeout
from . import again as short
from .plan import Plan, aligned, heap_or_reason, num_sms, on, pays, ran
from .workspaces import matmul_workspace


def again(
    A: Tensor, B: Tensor, reduce_op: str, dim: int, group_name: str, out_dtype: torch.dtype | None
) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors, dimension and operation may be anything. A call that names the dtype of its result takes the long way.
    """
    if out_dtype is not None:
        return None
    if dim < 0 and isinstance(A, Tensor):
        dim += A.dim()
    results = short.again(host.OP, (dim, reduce_op), (A, B), group_name)
    return None if results is None else results[0]


def run(
    A: Tensor, B: Tensor, reduce_op: str, dim: int, group: ProcessGroup, out_dtype: torch.dtype
) -> Tensor:
    """As the op; the arguments are checked and ``dim`` is not negative."""
    shape = [*A.shape[:-1], B.shape[1]]
    shape[dim] //= group.size()
    found = heap_or_reason(A, group, empty=0 in shape)
    if isinstance(found, str):
        done: Tensor | str = found
    elif A.device.type == "cpu":
        done = _on_cpu(found, A, B, reduce_op, dim, out_dtype).view(shape)
    elif dim == A.dim() - 1:
        done = "the last dimension is scattered"
    else:
        done = _on_cuda(found, A, B, reduce_op, dim, shape, out_dtype)
    if isinstance(done, str):
        ran(Plan("unfused", done))
        return unfused(A, B, reduce_op, dim, group, out_dtype)
    return done


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


def _on_cuda(
    where: Heap, A: Tensor, B: Tensor, reduce_op: str, dim: int, shape: list[int], out_dtype: torch.dtype
) -> Tensor | str:
    """The result, or why it is better computed unfused."""
    from ..kernels.matmul_reduce_scatter import on_cuda

    parts, b = used = aligned(_parts(A, dim, where.world_size)), aligned(B)
    sms, average = num_sms(b.device), reduce_op == "avg"
    choice = on_cuda.choose(parts, b, sms)
    if isinstance(choice, str):
        return choice
    if not pays(choice.pays):
        return "too little is multiplied and scattered"
    with on(b.device):
        tune = partial(on_cuda.tuned, average=average, out_dtype=out_dtype)
        choice, chosen = tune(choice, where, parts, b, sms)
        workspace = matmul_workspace(where, choice.half_bytes, choice.flags)
        workspace.raise_if_broken(host.OP)
        plan = Plan(choice.algorithm, workspace_bytes=workspace.layout.bytes, chosen=chosen)
        ran(plan)
        timeout_ns = int(get_timeout(where.group_name) * 1e9)
        compute = partial(on_cuda.run, average=average, out_dtype=out_dtype)
        out = compute(choice, workspace, parts, b, sms, timeout_ns).view(shape)
    launcher = on_cuda.launcher(choice, workspace, average=average, out_dtype=out_dtype)
    if launcher is not None and out_dtype == A.dtype:
        arguments = (dim, reduce_op)
        short.remember(host.OP, arguments, (A, B), used, [out], workspace, launcher, plan, pays=choice.pays)
    return out
