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

from collections.abc import Callable
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
from .calls_taken import counts

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
OPS = {
    name: getattr(torch.ops.symm_mem, name).default
    for name in (GATHER, SCATTER, SCALED_GATHER, SCALED_SCATTER)
}
DEVICES = ("CUDA", "CPU")


class Switch:
    """Whether the kernels are installed. After ``uninstall`` one may still be called: in a TorchDispatchMode torch
    keeps the kernel that was registered last."""

    on = False


def _torchs(name: str) -> list[Callable[..., Any]]:
    """What torch registers of one of the ops: that of CUDA; and that of "meta" and of the test mode, by functional
    collectives, which run on any device.

    Its Python functions, not its kernels (``torch.library.get_kernel``): in a TorchDispatchMode a kernel written in
    Python leads to the one that was registered last.

    Raises:
        RuntimeError: the installed torch has none.
    """
    found = [getattr(torch_symm, f"_{name}{kind}", None) for kind in ("", "_fallback")]
    if None in found:
        raise RuntimeError(f"torch {torch.__version__} has no _{name} in torch.distributed._symmetric_memory")
    return found  # type: ignore[return-value]


class _Taken(NamedTuple):
    """How weft takes calls of one of the ops.

    Attributes:
        dim: which of its arguments is the dimension.
        refuses: whether torch refuses a call for more than what it says of all four.
        fp8: where dtypes of results are named; without them torch's results are fp8.
        fast: launches at once what was launched before, if no record of the call is needed for that.
    """

    op: Op
    dim: int
    refuses: Callable[[Any], bool]
    fp8: str = ""
    fast: Callable[..., Any] | None = None


def _differ_in_number(call: Any) -> bool:
    of_each = call.biases, call.result_scales, call.out_dtypes, call.use_fast_accum
    return any(len(given) != len(call.Bs) for given in of_each)


def _scatters_nothing(call: Any) -> bool:
    shape = call.output_shape
    return shape is None or not 0 <= call.orig_scatter_dim < len(shape) or _unknown_sum(call)


def _unknown_sum(call: Any) -> bool:
    return call.reduce_op not in validation.REDUCE_OPS


def _gathered_again(A: Tensor, Bs: list[Tensor], dim: int, group_name: str, return_A: bool = True) -> Any:
    done = launch_again(GATHER, (dim, return_A), (A, *Bs), group_name)
    return None if done is None else ((done.pop() if return_A else None), done)


def _scattered_again(A: Tensor, B: Tensor, reduce_op: str, dim: int, group_name: str) -> Any:
    done = launch_again(SCATTER, (dim, reduce_op), (A, B), group_name)
    return None if done is None else done[0]


_HOW = {
    GATHER: _Taken(ALL_GATHER_MATMUL, 2, lambda call: False, fast=_gathered_again),
    SCATTER: _Taken(MATMUL_REDUCE_SCATTER, 3, _unknown_sum, fast=_scattered_again),
    SCALED_GATHER: _Taken(ALL_GATHER_SCALED_MATMUL, 4, _differ_in_number, "out_dtypes"),
    SCALED_SCATTER: _Taken(SCALED_MATMUL_REDUCE_SCATTER, 6, _scatters_nothing, "out_dtype"),
}


def matmul_on_weft(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What the op then runs on CPU and CUDA, and for fake tensors."""
    on_cuda, functional = _torchs(name)
    op, at, refuses, fp8, fast = _HOW[name]
    record = op.record

    def kernel(*args: Any, **named: Any) -> Any:
        mine = Switch.on and not torch_symm._is_test_mode
        if fast is not None and mine and args[at] >= 0 and (done := fast(*args, **named)) is not None:
            counts[name, "weft", ""] += 1
            return done
        call = record(*args, **named)
        first, Bs = call[0], call[1] if isinstance(call[1], list) else [call[1]]
        refused = first.dim() < 2 or not 0 <= args[at] < first.dim() or any(B.dim() != 2 for B in Bs)
        refused = refused or refuses(call)
        dtypes = getattr(call, fp8) if fp8 else ()
        why: str | None = None
        if None in (dtypes if isinstance(dtypes, (list, tuple)) else (dtypes,)):
            why = f"{fp8}: is None, for which torch's results are fp8"
        elif fp8 and mine and not refused and (done := op.fast(call)) is not None:
            counts[name, "weft", ""] += 1
            return done
        if (why := why or _why_not(op, call, refused)) is None:
            result = op.slow(call)
            plan = last_plan()
            counts[name, "weft", plan.reason if plan.algorithm == "unfused" else ""] += 1
            return result
        counts[name, "torch", why] += 1
        # Of what that of CUDA refuses it looks at no memory, so it says the same of tensors on CPU.
        run = functional if first.device.type == "cpu" and not refused else on_cuda
        return run(*args, **named)

    return kernel, functional


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
