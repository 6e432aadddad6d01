"""fused_all_gather_matmul: from the op's tensors to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather_matmul import host
from ...kernels.all_gather_matmul.reference import reference_all_gather_matmul
from ...symm_mem.heap.heap import Heap
from ...symm_mem.timeouts import timeout_in_ns
from ..dispatch import fast_path
from ..dispatch.plan import Plan, heap_or_reason, num_sms, preferred_kernel, ran, should_fuse, why_tf32
from ..dispatch.staging import Staging, in_rows, in_rows_or_columns, rows_of
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import matmul_workspace, workspace_of_choice
from .calls import AllGatherMatmulCall

Result: TypeAlias = tuple[Tensor | None, list[Tensor]]


def fast_all_gather_matmul(
    A_shard: Tensor, Bs: Sequence[Tensor], dim: int, group_name: str, return_A: bool
) -> Result | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened.

    Tensors and dimension may be anything.
    """
    if dim < 0 and isinstance(A_shard, Tensor):
        dim += A_shard.dim()
    results = fast_path.run_fast(host.OP, (dim, return_A), (A_shard, *Bs), group_name)
    if results is None:
        return None
    return (results.pop() if return_A else None), results


def run_all_gather_matmul(call: AllGatherMatmulCall, group: ProcessGroup) -> Result:
    """As the op; the call is what validation returns."""
    A_shard = call.A_shard
    found = heap_or_reason(host.OP, A_shard, group, empty=A_shard.numel() == 0)
    if isinstance(found, str):
        done: Result | str = found
    elif A_shard.device.type == "cpu":
        done = _on_cpu(found, call)
    else:
        done = _on_cuda(found, call)
    if isinstance(done, str):
        ran(Plan("unfused", done))
        A, outs = reference_all_gather_matmul(A_shard, call.Bs, call.gather_dim, group)
        return (A if call.return_A else None), outs
    return done


def _on_cpu(where: Heap, call: AllGatherMatmulCall) -> Result:
    A_shard, Bs, dim, return_A = call.A_shard, call.Bs, call.gather_dim, call.return_A
    split_k, size = dim == A_shard.dim() - 1, where.world_size
    front = A_shard if split_k else A_shard.movedim(dim, 0)
    a = front.flatten(0, -2).contiguous()
    workspace = matmul_workspace(
        where, host.host_gather_layout(a.shape[0], a.shape[1], a.element_size(), size)
    )
    ran(Plan("host", workspace_bytes=workspace.layout.bytes))
    gathered, products = host.host_all_gather_matmul(workspace, a, Bs, split_k=split_k)
    if split_k and return_A:
        # By way of one dimension: where K is 1, a view with other strides would do.
        gathered = gathered.movedim(0, 1).reshape(-1).view(a.shape[0], size * a.shape[1])
    return _shaped(gathered if return_A else None, products, front, dim, size)


def _on_cuda(where: Heap, call: AllGatherMatmulCall) -> Result | str:
    """The result, or why it is better computed unfused."""
    from ...kernels.all_gather_matmul import on_cuda
    from ...kernels.all_gather_matmul.configs import GatherKernelCall
    from ...kernels.device.jit.launch import is_transposed

    A_shard, Bs, dim, return_A = call.A_shard, call.Bs, call.gather_dim, call.return_A
    split_k = dim == A_shard.dim() - 1
    front = A_shard if split_k else A_shard.movedim(dim, 0)
    if (reason := why_tf32(front.dtype)) is not None:
        return reason
    staging, size = Staging(), where.world_size
    a = staging.take("A_shard", front, rows_of, on_cuda.takes_rows)
    # The kernel for 16 bits reads them all: of some in rows and some in columns, those in columns are copied.
    alike = front.dtype.itemsize > 2 or len({is_transposed(B) for B in Bs}) == 1
    fits = in_rows_or_columns if alike else in_rows
    bs = [staging.take(f"Bs[{i}]", B, fits=fits) for i, B in enumerate(Bs)]
    used = (a, *bs)
    kernel_call = GatherKernelCall(a, bs, num_sms(a.device), split_k, return_A, preferred_kernel())
    choice = on_cuda.choose_gather_kernel(kernel_call, size)
    if isinstance(choice, str):
        return choice
    if not should_fuse(choice.profitable):
        return "too little is gathered and multiplied"
    with in_stream_order(a.device):
        staging.copy()
        choice, chosen = on_cuda.tuned_gather(choice, where, kernel_call)
        if choice.algorithm == "copy_engine":
            kernel_call = replace(kernel_call, a=a.contiguous())
        workspace = workspace_of_choice(where, choice)
        workspace.raise_if_broken(None if choice.algorithm == "one_shot" else host.OP)  # that says it itself
        plan = Plan(choice.algorithm, staging.reason, workspace.layout.bytes, chosen, choice.predicted_us)
        ran(plan)
        timeout_ns = timeout_in_ns(where.group_name)
        gathered, products = on_cuda.launch_all_gather_matmul(choice, workspace, kernel_call, timeout_ns)
    A, outs = _shaped(gathered, products, front, dim, size)
    if (launcher := on_cuda.gather_launcher(choice, workspace, return_A)) is not None:
        results = outs if A is None else [*outs, A]
        made = fast_path.LaunchedCall(host.OP, (dim, return_A), call.tensors, used, results)
        fast_path.remember_call(made, workspace, launcher, plan, profitable=choice.profitable)
    return A, outs


def _shaped(gathered: Tensor | None, products: list[Tensor], front: Tensor, dim: int, size: int) -> Result:
    """Rows of all ranks as the op returns them; ``front`` is the shard with ``dim`` in front, unless it is the last."""

    def shaped(flat: Tensor) -> Tensor:
        if dim == front.dim() - 1:
            return flat.view(*front.shape[:-1], flat.shape[-1])
        return flat.view(size * front.shape[0], *front.shape[1:-1], flat.shape[-1]).movedim(0, dim)

    return (None if gathered is None else shaped(gathered)), [shaped(p) for p in products]
