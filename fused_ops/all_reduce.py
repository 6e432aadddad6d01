"""one_shot_all_reduce: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.all_reduce import host
from ..kernels.all_reduce.reference import all_reduce as unfused
from ..symm_mem import get_timeout
from .plan import Plan, heap_or_reason, ran
from .workspaces import all_reduce_workspace, matmul_workspace


def run(x: Tensor, reduce_op: str, group: ProcessGroup) -> Tensor:
    """As the op; the arguments are checked."""
    found = heap_or_reason(x, group, empty=x.numel() == 0)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return unfused(x, reduce_op, group)
    source = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.device.type == "cpu":
        workspace = matmul_workspace(found, *host.needs(x.nbytes, found.world_size))
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        host.all_reduce(workspace, source.view(-1), out.view(-1), reduce_op)
        return out
    from ..kernels.all_reduce.cuda_kernel import launch, load

    with torch.cuda.device(x.device):
        place = all_reduce_workspace(found, source.nbytes)
        place.raise_if_broken(host.OP)
        ran(Plan("push", workspace_bytes=place.layout.bytes))
        if x.dtype not in place.prepared:
            size, dtype, device = found.world_size, x.dtype, x.device
            found.prepare(host.OP, (host.OP, dtype), lambda: load(size, dtype, device))
            place.prepared[dtype] = True
        timeout_ns = int(get_timeout(found.group_name) * 1e9)
        launch(place, source, out, reduce_op, timeout_ns, torch.cuda.current_stream().cuda_stream)
    return out
