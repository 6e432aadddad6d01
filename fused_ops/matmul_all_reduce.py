"""fused_matmul_all_reduce: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.matmul_all_reduce import host
from ..kernels.matmul_all_reduce.reference import matmul_all_reduce as unfused
from ..symm_mem import Heap, get_timeout
from . import again as short
from . import all_reduce
from .plan import Plan, aligned, heap_or_reason, num_sms, on, pays, ran
from .workspaces import matmul_workspace


def again(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors and operation may be anything.
    """
    results = short.again(host.OP, reduce_op, (A, B), group_name)
    return None if results is None else results[0]


def run(A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup) -> Tensor:
    """As the op; the arguments are checked."""
    shape = (*A.shape[:-1], B.shape[1])
    found = heap_or_reason(A, group, empty=0 in shape)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return unfused(A, B, reduce_op, group)
    if A.device.type == "cpu":
        a = A.flatten(0, -2)
        needs = host.needs(a.shape[0], B.shape[1], A.element_size(), found.world_size)
        workspace = matmul_workspace(found, *needs)
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        return host.matmul_all_reduce(workspace, a, B, reduce_op).view(shape)
    with on(A.device):
        return _on_cuda(found, A, B, reduce_op, group, shape)


def _on_cuda(
    where: Heap, A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup, shape: tuple[int, ...]
) -> Tensor:
    from ..kernels.matmul_reduce_scatter import to_all

    a, b, sms = aligned(A.flatten(0, -2)), aligned(B), num_sms(A.device)
    choice = to_all.choose(a, b, where.world_size, sms)
    if isinstance(choice, str) or not pays(choice.pays):
        out = A.new_empty(shape)
        torch.mm(a, b, out=out.view(a.shape[0], B.shape[1]))
        return all_reduce.in_place(out, reduce_op, group)
    workspace = matmul_workspace(where, choice.half_bytes, choice.flags)
    workspace.raise_if_broken(host.OP)
    plan = Plan(choice.algorithm, workspace_bytes=workspace.layout.bytes)
    ran(plan)
    timeout_ns = int(get_timeout(where.group_name) * 1e9)
    result, launcher = to_all.run(choice, workspace, a, b, sms, timeout_ns, host.OP, reduce_op)
    out = result.view(shape)
    short.remember(host.OP, reduce_op, (A, B), (a, b), [out], workspace, launcher, plan, pays=choice.pays)
    return out
