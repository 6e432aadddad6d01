"""one_shot_reduce_scatter: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.reduce_scatter import host
from ...kernels.reduce_scatter.configs import choose_reduce_scatter
from ...kernels.reduce_scatter.reference import reference_reduce_scatter
from ...symm_mem.heap.heap import Heap
from ..dispatch import fast_path
from ..dispatch.plan import Plan, heap_or_reason, num_sms, ran
from ..dispatch.workspaces import matmul_workspace
from .calls import ReduceScatterCall
from .stand_alone import KINDS, StandAlone, fast_into, run_alone


def fast_reduce_scatter(x: Tensor, reduce_op: str, dim: int, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened. All may be anything."""
    if dim < 0 and isinstance(x, Tensor):
        dim += x.dim()
    results = fast_path.run_fast(host.OP, (dim, reduce_op), (x,), group_name, KINDS)
    return None if results is None else results[0]


def fast_reduce_scatter_out(
    out: Tensor, x: Tensor, reduce_op: str, dim: int, group_name: str
) -> Tensor | None:
    """``out``, with the result; likewise."""
    if dim < 0 and isinstance(x, Tensor):
        dim += x.dim()
    return out if fast_into(host.INTO, (dim, reduce_op), out, x, group_name) else None


def run_reduce_scatter(call: ReduceScatterCall, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
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
        done = reference_reduce_scatter(x, call.reduce_op, call.scatter_dim, group)
    return done if out is None or out is done else out.copy_(done)


def _on_cpu(where: Heap, call: ReduceScatterCall, op: str) -> Tensor:
    x, dim, size = call.x, call.scatter_dim, where.world_size
    shape = call.part_shape(size)
    workspace = matmul_workspace(where, host.host_reduce_scatter_layout(x.nbytes // size, size))
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    parts = x.unflatten(dim, (size, shape[dim])).movedim(dim, 0).reshape(size, -1)
    return host.host_reduce_scatter(workspace, parts, call.reduce_op, op).view(shape)


def _on_cuda(where: Heap, call: ReduceScatterCall, out: Tensor | None) -> Tensor | str:
    from ...kernels.reduce_scatter.cuda_kernel import reduce_scatter_function

    x, reduce_op, dim, size = call.x, call.reduce_op, call.scatter_dim, where.world_size
    given, op = ([x], host.OP) if out is None else ([out, x], host.INTO)
    alone = StandAlone(host.OP, op, (dim, reduce_op), given, call.part_shape(size), dim, gathers=False)
    function = partial(reduce_scatter_function, (size, where.rank, x.dtype, reduce_op), x.device)
    return run_alone(
        where, alone, choose_reduce_scatter(size, num_sms(x.device)), ((x.dtype, reduce_op), function)
    )
