"""fused_all_gather_matmul: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.all_gather_matmul import host
from ..kernels.all_gather_matmul.reference import all_gather_matmul as unfused
from ..symm_mem import Heap, get_timeout
from .plan import Plan, aligned, heap_or_reason, num_sms, on, pays, ran
from .workspaces import matmul_workspace


def run(
    A_shard: Tensor, Bs: list[Tensor], dim: int, group: ProcessGroup, return_A: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """As the op; the arguments are checked and ``dim`` is not negative."""
    found = heap_or_reason(A_shard, group, empty=A_shard.numel() == 0)
    if isinstance(found, str):
        return _unfused(A_shard, Bs, dim, group, return_A, found)
    split_k = dim == A_shard.dim() - 1
    front = A_shard if split_k else A_shard.movedim(dim, 0)
    a = front.flatten(0, -2).contiguous()
    gathered: Tensor | None
    if a.device.type == "cpu":
        gathered, products = _on_cpu(found, a, Bs, split_k)
    else:
        if split_k:
            return _unfused(A_shard, Bs, dim, group, return_A, "the last dimension is gathered")
        done = _on_cuda(found, aligned(a), [aligned(B) for B in Bs], return_A)
        if isinstance(done, str):
            return _unfused(A_shard, Bs, dim, group, return_A, done)
        gathered, products = done
    if split_k:
        wanted = gathered if return_A else None
        shape = (*A_shard.shape[:-1], group.size() * A_shard.shape[-1])
        A = None if wanted is None else wanted.movedim(0, 1).reshape(-1).view(shape)
        return A, [p.view(*A_shard.shape[:-1], p.shape[-1]) for p in products]

    def shaped(flat: Tensor) -> Tensor:
        return flat.view(group.size() * front.shape[0], *front.shape[1:-1], flat.shape[-1]).movedim(0, dim)

    return (shaped(gathered) if return_A and gathered is not None else None), [shaped(p) for p in products]


def _unfused(
    A_shard: Tensor, Bs: list[Tensor], dim: int, group: ProcessGroup, return_A: bool, reason: str
) -> tuple[Tensor | None, list[Tensor]]:
    ran(Plan("unfused", reason))
    A, outs = unfused(A_shard, Bs, dim, group)
    return (A if return_A else None), outs


def _on_cpu(where: Heap, a: Tensor, Bs: list[Tensor], split_k: bool) -> tuple[Tensor, list[Tensor]]:
    workspace = matmul_workspace(
        where, *host.needs(a.shape[0], a.shape[1], a.element_size(), where.world_size)
    )
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    return host.all_gather_matmul(workspace, a, Bs, split_k=split_k)


def _on_cuda(
    where: Heap, a: Tensor, Bs: list[Tensor], return_A: bool
) -> tuple[Tensor | None, list[Tensor]] | str:
    """The result, or why it is better computed unfused."""
    from ..kernels.all_gather_matmul import on_cuda

    sms, size = num_sms(a.device), where.world_size
    choice = on_cuda.choose(a, Bs, size, sms)
    if isinstance(choice, str):
        return choice
    if not pays(choice.pays):
        return "too little is gathered and multiplied"
    with on(a.device):
        copied = choice.algorithm == "copy_engine"
        workspace = matmul_workspace(where, choice.half_bytes, choice.flags, copied=copied)
        workspace.raise_if_broken(host.OP)
        ran(Plan(choice.algorithm, workspace_bytes=workspace.layout.bytes))
        timeout_ns = int(get_timeout(where.group_name) * 1e9)
        return on_cuda.run(choice, workspace, a, Bs, sms, timeout_ns, return_A=return_A)
