"""What torch's other code is told of groups with weft: Dynamo, DistributedDataParallel, functional collectives."""

from __future__ import annotations

import importlib
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch._C._dynamo import eval_frame
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ReduceScatterOptions

from ...symm_mem import resolve_group
from .group import WeftProcessGroup
from .options import functional_reduction

_library = torch.library.Library("_c10d_functional", "IMPL")


@cache
def see_groups() -> None:
    """From now on."""
    _tell_dynamo()
    dist.Reducer = _Reducer  # type: ignore[misc]
    # torch's C++ code calls the method of a group for these, which Inductor puts in for buckets. Before torch 2.15 it
    # does not look for one in Python there, and such a call bypassed the group and went to gloo or NCCL.
    kernels = {
        "all_gather_into_tensor_out": _all_gather_into_tensor_out,
        "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    }
    for name, kernel in kernels.items():
        if hasattr(torch.ops._c10d_functional, name):
            for key in ("CPU", "CUDA"):
                _library.impl(name, kernel, key)


def _tell_dynamo() -> None:
    """It takes a group with weft as it takes torch's own: it breaks the graph at a call, and runs the call as it is."""
    # After a break Dynamo would compile these methods, and knows no member of a group but torch's. A code object that
    # it skips, with all that is called there, costs a call nothing; ``torch._disable_dynamo`` costs up to 4 us.
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for name, method in vars(WeftProcessGroup).items():
        if isinstance(method, FunctionType) and callable(getattr(ProcessGroup, name, None)):
            eval_frame.set_code_exec_strategy(method.__code__, skip)
    # Before 2.13 it knows groups of exactly torch's type.
    if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        variable: Any = importlib.import_module("torch._dynamo.variables.distributed").ProcessGroupVariable
        is_process_group = variable.is_process_group
        variable.is_process_group = staticmethod(
            lambda value: type(value) is WeftProcessGroup or is_process_group(value)
        )


class _Reducer(dist.Reducer):
    """DDP's buckets go to the group's own backend.

    Its C++ code calls the group in the midst of the backward pass, and code in Python takes the host longer there than
    weft's all-reduce gains on GPUs, which hide it behind the backward pass in any case (bench/NOTES.md).
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        inner = {name: _inner_of(value) for name, value in named.items()}
        super().__init__(*map(_inner_of, args), **inner)

    def _update_process_group(self, new_process_group: Any) -> None:
        # Ranks that make their DDP anew, as these others join, send the same buckets.
        super()._update_process_group(_inner_of(new_process_group))


def _inner_of(group: Any) -> Any:
    """Of a group with weft; anything else as it is."""
    return group.inner if isinstance(group, WeftProcessGroup) else group


def _all_gather_into_tensor_out(x: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> Tensor:
    work = _group_of(group_name)._allgather_base(out, x.contiguous())
    _register_work(out, work)
    return out


def _reduce_scatter_tensor_out(
    x: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    opts = ReduceScatterOptions()
    opts.reduceOp = functional_reduction(reduce_op)
    work = _group_of(group_name)._reduce_scatter_base(out, x.contiguous(), opts)
    _register_work(out, work)
    return out


def _group_of(group: Any) -> ProcessGroup:
    return resolve_group(group if isinstance(group, (str, ProcessGroup)) else ProcessGroup.unbox(group))
