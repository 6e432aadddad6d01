"""fused_matmul_all_reduce: one kernel for large products, and for others cuBLAS with an all-reduce behind it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.device.empty import Empty, empty_on
from ..kernels.matmul_all_reduce import host
from ..kernels.matmul_all_reduce.reference import matmul_all_reduce as unfused
from ..symm_mem import Heap, findings, get_timeout, is_checked, resolve_group
from ..symm_mem.calls import whole
from ..symm_mem.registry import has_name
from . import again as short
from . import all_reduce
from .plan import Plan, aligned, heap_or_reason, num_sms, on, pays, ran
from .turns import stream_on, turn
from .workspaces import matmul_workspace, product_workspace


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding: such a call is one product and one all-reduce behind it."""

    group: ProcessGroup
    sizes: tuple[int, int]  # of the product
    empty: Empty


def again(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors and operation may be anything.
    """
    looked_at = short.look(host.OP, reduce_op, (A, B))
    if looked_at is None or stream_on(A.get_device()) is None:
        return None
    found: _Found | None = findings.kept.get((looked_at[0], group_name))
    if found is None:
        results = short.again(host.OP, reduce_op, (A, B), group_name)
        return None if results is None else results[0]
    if not has_name(found.group, group_name):
        return None
    sizes, flat = found.sizes, A.dim() == 2
    out = found.empty(sizes, (sizes[1], 1), A.dtype)
    torch.mm(A if flat else A.flatten(0, -2), B, out=out)
    if all_reduce.again(out, reduce_op, group_name, out, host.OP) is None:
        _reduce(out, reduce_op, group_name)
    return out if flat else out.view(*A.shape[:-1], sizes[1])


@whole
def _reduce(out: Tensor, reduce_op: str, group_name: str) -> None:
    """The all-reduce the long way, under this op's name."""
    all_reduce.run(out, reduce_op, resolve_group(group_name), out, op=host.OP)


def _remember(kept: dict[Hashable, Any], A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup) -> None:
    """Such a call was a product and an all-reduce. ``kept``: what ``findings.kept`` was in front of it."""
    if not is_checked():
        found = _Found(group, (A.shape[:-1].numel(), B.shape[1]), empty_on(A.device))
        findings.keep(kept, (short.key_of(host.OP, reduce_op, (A, B)), group.group_name), found)


def run(A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup) -> Tensor:
    """As the op; the arguments are checked."""
    kept = findings.kept
    shape = (*A.shape[:-1], B.shape[1])
    found = heap_or_reason(A, group, empty=0 in shape)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return unfused(A, B, reduce_op, group)
    a = A.flatten(0, -2)
    if A.device.type == "cpu":
        layout = host.layout(a.shape[0], B.shape[1], A.element_size(), found.world_size)
        workspace = matmul_workspace(found, layout)
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        return host.matmul_all_reduce(workspace, a, B, reduce_op).view(shape)
    with on(A.device):
        out = _in_one_kernel(found, A, B, reduce_op)
        if out is None:
            out = a.new_empty(a.shape[0], B.shape[1])
            torch.mm(a, B, out=out)
            all_reduce.in_place(out, reduce_op, group, host.OP)
            _remember(kept, A, B, reduce_op, group)
    return out.view(shape)


def _in_one_kernel(where: Heap, A: Tensor, B: Tensor, reduce_op: str) -> Tensor | None:
    """The result, [M, N]; None if the kernel cannot take the call, or a product and an all-reduce are faster."""
    from ..kernels.matmul_reduce_scatter import to_all

    a, b, sms = aligned(A.flatten(0, -2)), aligned(B), num_sms(A.device)
    choice = to_all.choose(a, b, where.world_size, sms)
    if isinstance(choice, str) or not pays(choice.pays):
        return None
    with turn(A.device):
        workspace = product_workspace(where, choice)
        workspace.raise_if_broken(host.OP)
        plan = Plan(choice.algorithm, workspace_bytes=workspace.layout.bytes)
        ran(plan)
        timeout_ns = int(get_timeout(where.group_name) * 1e9)
        out, launcher = to_all.run(choice, workspace, a, b, sms, timeout_ns, host.OP, reduce_op)
    shaped = out.view(*A.shape[:-1], B.shape[1])
    short.remember(host.OP, reduce_op, (A, B), (a, b), [shaped], workspace, launcher, plan, pays=choice.pays)
    return out
