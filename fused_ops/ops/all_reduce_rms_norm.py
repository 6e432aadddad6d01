"""fused_all_reduce_rms_norm, and what fused_all_reduce_layer_norm is but for its fast path: from the op's tensors to a
kernel's, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_reduce_rms_norm import host
from ...kernels.all_reduce_rms_norm.reference import Affine, NormKind, add_residual_and_norm
from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.timeouts import timeout_in_ns
from ...symm_mem.workspace import Workspace
from ..dispatch import fast_path, planning
from ..dispatch.plan import Plan, aligned, heap_or_reason, num_sms, ran
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import ALL_REDUCE, matmul_workspace, push_workspace
from . import all_reduce

if TYPE_CHECKING:
    from ...kernels.all_reduce_rms_norm.cuda_kernel import AllReduceRmsNormLauncher


def fast_all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    norm: float | tuple[float, float, bool],
    group_name: str,
) -> tuple[Tensor, Tensor] | None:
    """As the op, if such a call was made before on CUDA; else None, and nothing happened. Tensors may be anything.

    Args:
        norm: eps, or with it what is not as usual: as ``named_norm`` gives it.
    """
    tensors = (x, weight) if residual is None else (x, residual, weight)
    results = fast_path.run_fast(host.OP, norm, tensors, group_name, (ALL_REDUCE,))
    return None if results is None else (results[0], results[1])


def named_norm(eps: float, weight_offset: float, round_sum: bool) -> float | tuple[float, float, bool]:
    """By what the fast path knows a norm."""
    return eps if round_sum and weight_offset == 0 else (eps, weight_offset, round_sum)


def named_layer_norm(eps: float, weight_offset: float, *given: bool) -> tuple[float, ...]:
    """By what it knows a LayerNorm: its numbers, and whether there are residual, weight and bias."""
    return eps, weight_offset, *given


def name_of_norm(kind: NormKind) -> float | tuple[float, ...]:
    """By what the fast path knows what was computed."""
    if kind.subtract_mean:
        return named_layer_norm(kind.eps, kind.weight_offset, kind.residual, kind.weight, kind.bias)
    return named_norm(kind.eps, kind.weight_offset, kind.round_sum)


def run_all_reduce_norm(
    x: Tensor, residual: Tensor | None, affine: Affine, kind: NormKind, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """As the op that ``kind`` is of; the arguments are checked."""
    op = host.op_of(kind)
    found = heap_or_reason(op, x, group, empty=x.numel() == 0)
    reason = found if isinstance(found, str) else _why_not(x, found.world_size)
    if isinstance(found, str) or reason is not None:
        return _unfused(x, residual, affine, kind, group, reason or "")
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    x2 = x.reshape(rows, hidden).contiguous()
    residual2 = None if residual is None else residual.reshape(rows, hidden).contiguous()
    columns = Affine(*(None if t is None else t.contiguous() for t in affine))
    if x.device.type == "cpu":
        workspace = matmul_workspace(
            found, host.host_norm_layout(rows, hidden * x.element_size(), found.world_size)
        )
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        normed, sums = host.host_all_reduce_rms_norm(workspace, x2, residual2, columns, kind)
    else:
        given = [t for t in (x, residual, *affine) if t is not None]
        used = [aligned(t) for t in (x2, residual2, *columns) if t is not None]
        place, kernel, plan, (normed, sums) = _on_cuda(found, used, kind)
        results = [normed.view(x.shape), sums.view(x.shape)]
        made = fast_path.LaunchedCall(op, name_of_norm(kind), given, used, results)
        fast_path.remember_call(made, place, kernel, plan, profitable=True, grids=kernel.grids)
    return normed.view(x.shape), sums.view(x.shape)


def _unfused(
    x: Tensor, residual: Tensor | None, affine: Affine, kind: NormKind, group: ProcessGroup, reason: str
) -> tuple[Tensor, Tensor]:
    """The all-reduce by itself, which may well be fused with nothing and still be ours."""
    planning.stop(Plan("unfused", reason), goes_on=True)  # the all-reduce has a plan of its own
    total = all_reduce.run_all_reduce(x, "sum", group, op=host.op_of(kind))
    ran(Plan("unfused", reason))
    normed, sums = add_residual_and_norm(total, residual, affine, kind)
    return normed.contiguous(), sums.contiguous()


def _why_not(x: Tensor, world_size: int) -> str | None:
    if x.device.type == "cpu":
        return None
    from ...kernels.all_reduce_rms_norm.cuda_kernel import why_no_norm_kernel

    return why_no_norm_kernel(x.shape[-1], x.dtype, world_size)


def _on_cuda(
    where: Heap, operands: list[Tensor], kind: NormKind
) -> tuple[Workspace[Any], AllReduceRmsNormLauncher, Plan, tuple[Tensor, Tensor]]:
    from ...kernels.all_reduce_rms_norm import configs
    from ...kernels.all_reduce_rms_norm.cuda_kernel import AllReduceRmsNormLauncher
    from ...kernels.device.comm.ll_exchange import VECTOR
    from ...kernels.device.tuning.choice import make_together

    op, x = host.op_of(kind), operands[0]
    rows, hidden = x.shape
    vectors = hidden * x.element_size() // VECTOR
    config = configs.choose_all_reduce_rms_norm(rows, vectors, where.world_size, num_sms(x.device))
    with in_stream_order(x.device):
        place = push_workspace(
            where, ALL_REDUCE, configs.all_reduce_rms_norm_layout(rows, vectors, where.world_size, config)
        )
        place.raise_if_broken()
        key: Any = (op, rows, hidden, x.dtype, kind)
        kernel = place.prepared.get(key)
        us = configs.estimate_all_reduce_rms_norm_us(rows, vectors, where.world_size, config)
        plan = Plan("push", workspace_bytes=place.layout.bytes, predicted_us=us)
        ran(plan)
        if kernel is None:

            def make() -> AllReduceRmsNormLauncher:
                return AllReduceRmsNormLauncher(place, rows, hidden, x.dtype, kind, config)

            kernel = make_together(place, op, key, key, make)
        normed, sums = torch.empty_like(x), torch.empty_like(x)
        timeout_ns = timeout_in_ns(where.group_name)
        place.raise_if_broken(op, grids=kernel.grids)
        addresses = [t.data_ptr() for t in operands]
        results = normed.data_ptr(), sums.data_ptr()
        kernel.launch(0, addresses, results, timeout_ns, current_stream_of(x))
    return place, kernel, plan, (normed, sums)
