"""one_shot_all_gather: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather import host
from ...kernels.all_gather.configs import choose_all_gather
from ...kernels.all_gather.reference import as_bytes, reference_all_gather
from ...symm_mem.heap.heap import Heap
from ..dispatch import fast_path
from ..dispatch.plan import Plan, heap_or_reason, num_sms, ran
from ..dispatch.workspaces import matmul_workspace
from .calls import AllGatherCall
from .stand_alone import KINDS, StandAlone, fast_into, run_alone


def fast_all_gather(x: Tensor, dim: int, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened. Both may be anything."""
    if dim < 0 and isinstance(x, Tensor):
        dim += x.dim()
    results = fast_path.run_fast(host.OP, dim, (x,), group_name, KINDS)
    return None if results is None else results[0]


def fast_all_gather_out(out: Tensor, x: Tensor, dim: int, group_name: str) -> Tensor | None:
    """``out``, with the result; likewise."""
    if dim < 0 and isinstance(x, Tensor):
        dim += x.dim()
    return out if fast_into(host.INTO, dim, out, x, group_name) else None


def run_all_gather(call: AllGatherCall, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
    """As the op; the call is what validation returns.

    Args:
        out: what the result is written to, and then returned; of its shape, with any strides.
    """
    x, op = call.x, host.OP if out is None else host.INTO
    found = heap_or_reason(op, x, group, empty=x.numel() == 0)
    if isinstance(found, str):
        done: Tensor | str = found
    elif x.device.type == "cpu":
        done = _on_cpu(found, call, op)
    else:
        done = _on_cuda(found, call, out)
    if isinstance(done, str):
        ran(Plan("unfused", done))
        done = reference_all_gather(x, call.gather_dim, group)
    return done if out is None or out is done else out.copy_(done)


def _on_cpu(where: Heap, call: AllGatherCall, op: str) -> Tensor:
    x, shape = call.x, call.whole_shape(where.world_size)
    workspace = matmul_workspace(where, host.host_all_gather_layout(x.nbytes, where.world_size))
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    stacked = host.host_all_gather(workspace, as_bytes(x.contiguous()), op)
    parts = stacked.view(-1).view(x.dtype).view(where.world_size, *x.shape)
    return parts.movedim(0, call.gather_dim).reshape(-1).view(shape)


def _on_cuda(where: Heap, call: AllGatherCall, out: Tensor | None) -> Tensor | str:
    from ...kernels.all_gather.cuda_kernel import all_gather_function

    x, dim, size = call.x, call.gather_dim, where.world_size
    given, op = ([x], host.OP) if out is None else ([out, x], host.INTO)
    alone = StandAlone(host.OP, op, dim, given, call.whole_shape(size), dim, gathers=True)
    function = partial(all_gather_function, size, where.rank, x.device)
    return run_alone(where, alone, choose_all_gather(size, num_sms(x.device)), ((), function))
