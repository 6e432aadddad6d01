"""Functional collectives that write where they are told, which Inductor puts in for buckets.

torch's C++ code calls the method of a group for them. Before torch 2.15 it does not look for one in Python there, and
such a call bypassed the group and went to gloo or NCCL.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ...symm_mem import resolve_group
from .options import functional_reduction

_library = torch.library.Library("_c10d_functional", "IMPL")


@cache
def see_out_ops() -> None:
    """From now on groups of any backend are asked in Python, as torch's own code asks them."""
    kernels = {
        "all_gather_into_tensor_out": _all_gather_into_tensor_out,
        "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    }
    for name, kernel in kernels.items():
        if hasattr(torch.ops._c10d_functional, name):
            for key in ("CPU", "CUDA"):
                _library.impl(name, kernel, key)


def _all_gather_into_tensor_out(x: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> Tensor:
    work = _group_of(group_name)._allgather_base(out, x.contiguous(), AllgatherOptions())
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
