"""The fused ops of ``torch.ops.symm_mem`` on weft: which calls weft takes, and where all others go.

A call goes to the implementation that was there before (torch's own), as it is, if

- torch refuses it: the error is torch's;
- weft refuses it (dtypes, devices, shapes): its reason is counted;
- it is on CUDA and the ranks cannot address each other's memory, or the GPU is no Hopper: weft has no kernel for it;
- it is inside of torch's ``_test_mode``;
- its operands are fp8 and no dtype is given: torch's results are fp8 then.

All of these are the same on all ranks. On CPU torch has no implementation: there its functional one, for "meta" and the
test mode, takes what weft does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as torch_symm
from torch import Tensor

from ...kernels.device.capability import why_no_kernel_on
from ...symm_mem import HeapUnavailable, forks, resolve_group
from ...symm_mem.call_site import calling
from ...symm_mem.heap.registry import get_heap
from .. import validation
from ..dispatch.launch_cache import launch_again
from ..dispatch.plan import last_plan
from ..ops import (
    ALL_GATHER_MATMUL,
    ALL_GATHER_SCALED_MATMUL,
    MATMUL_REDUCE_SCATTER,
    SCALED_MATMUL_REDUCE_SCATTER,
    Op,
)
from ..ops.all_gather_matmul import AllGatherMatmulCall, Result
from ..ops.all_gather_scaled_matmul import AllGatherScaledMatmulCall
from ..ops.matmul_reduce_scatter import MatmulReduceScatterCall
from ..ops.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatterCall
from .calls_taken import counts

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
_NAMES = (GATHER, SCATTER, SCALED_GATHER, SCALED_SCATTER)
OPS = {name: getattr(torch.ops.symm_mem, name).default for name in _NAMES}
DEVICES = ("CUDA", "CPU")


class TorchImplementation(NamedTuple):
    """Of one of the ops, what torch registers.

    Its Python functions, not its kernels (``torch.library.get_kernel``): in a TorchDispatchMode a kernel written in
    Python leads to the one that was registered last.

    Attributes:
        on_cuda: that of CUDA.
        functional: that of "meta" and of the test mode, by functional collectives, which run on any device.
    """

    on_cuda: Callable[..., Any]
    functional: Callable[..., Any]

    def call(self, device: torch.device, refused: bool, *args: Any, **named: Any) -> Any:
        # Of what that of CUDA refuses it looks at no memory, so it says the same of tensors on CPU.
        run = self.functional if device.type == "cpu" and not refused else self.on_cuda
        return run(*args, **named)


class Switch:
    """Whether the kernels are installed. After ``uninstall`` one may still be called: in a TorchDispatchMode torch
    keeps the kernel that was registered last."""

    on = False


def torch_implementation(name: str) -> TorchImplementation:
    """
    Raises:
        RuntimeError: the installed torch has none.
    """
    found = [getattr(torch_symm, f"_{name}{kind}", None) for kind in ("", "_fallback")]
    if None in found:
        raise RuntimeError(f"torch {torch.__version__} has no _{name} in torch.distributed._symmetric_memory")
    return TorchImplementation(*found)  # type: ignore[arg-type]


def kernel_of(name: str, before: TorchImplementation) -> Callable[..., Any]:
    """What the op then runs on CPU and CUDA."""
    kernels = (
        _all_gather_matmul,
        _matmul_reduce_scatter,
        _all_gather_scaled_matmul,
        _scaled_matmul_reduce_scatter,
    )
    return kernels[_NAMES.index(name)](before)


def _all_gather_matmul(before: TorchImplementation) -> Callable[..., Result]:
    add, op = counts.add, ALL_GATHER_MATMUL

    def all_gather_matmul(
        A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, return_A: bool = True
    ) -> Result:
        if gather_dim >= 0 and Switch.on and not torch_symm._is_test_mode:
            done = launch_again(GATHER, (gather_dim, return_A), (A, *Bs), group_name)
            if done is not None:
                add(GATHER, "weft")
                return (done.pop() if return_A else None), done
        refused = A.dim() < 2 or not 0 <= gather_dim < A.dim() or any(B.dim() != 2 for B in Bs)
        call = AllGatherMatmulCall(A, Bs, gather_dim, group_name, return_A)
        if (why := _why_not(op, call, refused)) is None:
            return _taken(GATHER, op, call)
        add(GATHER, "torch", why)
        return before.call(A.device, refused, A, Bs, gather_dim, group_name, return_A=return_A)  # type: ignore[no-any-return]

    return all_gather_matmul


def _matmul_reduce_scatter(before: TorchImplementation) -> Callable[..., Tensor]:
    add, op = counts.add, MATMUL_REDUCE_SCATTER

    def matmul_reduce_scatter(
        A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
    ) -> Tensor:
        if scatter_dim >= 0 and Switch.on and not torch_symm._is_test_mode:
            done = launch_again(SCATTER, (scatter_dim, reduce_op), (A, B), group_name)
            if done is not None:
                add(SCATTER, "weft")
                return done[0]
        known = reduce_op in validation.REDUCE_OPS
        refused = A.dim() < 2 or not 0 <= scatter_dim < A.dim() or B.dim() != 2 or not known
        call = MatmulReduceScatterCall(A, B, reduce_op, scatter_dim, group_name)
        if (why := _why_not(op, call, refused)) is None:
            return _taken(SCATTER, op, call)
        add(SCATTER, "torch", why)
        return before.call(A.device, refused, A, B, reduce_op, scatter_dim, group_name)  # type: ignore[no-any-return]

    return matmul_reduce_scatter


def _all_gather_scaled_matmul(before: TorchImplementation) -> Callable[..., Any]:
    op = ALL_GATHER_SCALED_MATMUL

    def all_gather_scaled_matmul(*args: Any) -> Any:
        call = AllGatherScaledMatmulCall(*args)
        dim, dims, count = call.gather_dim, call.A_shard.dim(), len(call.Bs)
        of_each = call.biases, call.result_scales, call.out_dtypes, call.use_fast_accum
        refused = dims < 2 or not 0 <= dim < dims or any(B.dim() != 2 for B in call.Bs)
        refused = refused or any(len(given) != count for given in of_each)
        if all(dtype is not None for dtype in call.out_dtypes):
            return _scaled(SCALED_GATHER, op, call, refused, before, args)
        counts.add(SCALED_GATHER, "torch", "out_dtypes: is None, for which torch's results are fp8")
        return before.call(call.A_shard.device, refused, *args)

    return all_gather_scaled_matmul


def _scaled_matmul_reduce_scatter(before: TorchImplementation) -> Callable[..., Any]:
    op = SCALED_MATMUL_REDUCE_SCATTER

    def scaled_matmul_reduce_scatter(*args: Any) -> Any:
        call = ScaledMatmulReduceScatterCall(*args)
        dims = call.A.dim()
        refused = dims < 2 or not 0 <= call.scatter_dim_after_maybe_reshape < dims or call.B.dim() != 2
        refused = refused or call.reduce_op not in validation.REDUCE_OPS or call.output_shape is None
        refused = refused or not 0 <= call.orig_scatter_dim < len(call.output_shape or ())
        if call.out_dtype is not None:
            return _scaled(SCALED_SCATTER, op, call, refused, before, args)
        counts.add(SCALED_SCATTER, "torch", "out_dtype: is None, for which torch's result is fp8")
        return before.call(call.A.device, refused, *args)

    return scaled_matmul_reduce_scatter


def _scaled(
    name: str, op: Op, call: Any, refused: bool, before: TorchImplementation, args: Sequence[Any]
) -> Any:
    """A call of fp8 operands whose results are none of fp8."""
    if not refused and Switch.on and not torch_symm._is_test_mode and (done := op.fast(call)) is not None:
        counts.add(name, "weft")
        return done
    if (why := _why_not(op, call, refused)) is None:
        return _taken(name, op, call)
    counts.add(name, "torch", why)
    return before.call(call[0].device, refused, *args)


def _taken(name: str, op: Op, call: Any) -> Any:
    result = op.slow(call)
    plan = last_plan()
    counts.add(name, "weft", plan.reason if plan.algorithm == "unfused" else "")
    return result


def _why_not(op: Op, call: Any, refused: bool) -> str | None:
    """Why weft leaves a call to torch; None if it takes it.

    Raises:
        WeftError: the group is broken on this rank, a rank does not come, or this is a forked process.
    """
    if not Switch.on:
        return "weft is not installed"
    if torch_symm._is_test_mode:
        return "torch's test mode"
    if refused:
        return "torch refuses it"
    try:
        op.validate(call)
    except (TypeError, ValueError) as e:
        return str(e)
    first: Tensor = call[0]
    if not first.is_cuda:
        return None
    group = resolve_group(call.group_name)
    if group.size() == 1:
        return None
    calling.op = op.name  # for errors of the group's first call
    forks.refuse_child(group, calling.op)
    try:
        if (reason := why_no_kernel_on(op.kernel, first.device)) is None:
            get_heap(group, first.device)
    except HeapUnavailable as e:
        return str(e)
    return reason
