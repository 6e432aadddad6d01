"""A call of a process group that weft may take, as all ranks see it alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ...symm_mem.backends import cuda_state
from ..dispatch.call_check import OpCall

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
ALL_TO_ALL = "all_to_all_single"
_MOVED = (ALL_GATHER, ALL_TO_ALL)  # bit by bit, of any dtype
#: Bytes of the whole tensor, up to which weft takes a call: faster than NCCL at all sizes. Larger ones were not
#: measured next to a program's other kernels, and between CPU ranks a call's workspace grows with them.
MOST_BYTES = 64 << 20
#: The same of all-to-alls between more than 2 ranks, of which nothing was measured: what latency decides.
MOST_EXCHANGED = 1 << 20

_KIND: Any = dist.ReduceOp.RedOpType
_REDUCE_OPS = {_KIND.SUM: "sum", _KIND.AVG: "avg", _KIND.MAX: "max", _KIND.MIN: "min"}
_REDUCED = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(slots=True)
class GroupCall:
    """One tensor of a call.

    Attributes:
        name: of the collective, one of the constants above.
        out: what is written; of an all-reduce x itself.
        reduce_op: as weft's ops have it; "" of what reduces nothing.
    """

    name: str
    out: Tensor
    x: Tensor
    reduce_op: str = ""

    @property
    def kernel(self) -> str:
        """Of an op of ``capability.KERNELS``."""
        return self.name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")

    @property
    def compared(self) -> OpCall:
        """What ranks compare of it."""
        x = self.x
        given = {"dtype": x.dtype, "elements": x.numel(), "reduce_op": self.reduce_op}
        return OpCall(self.name, given, x.device.type)


def reduction_of(op: Any) -> str | None:
    """What weft's ops call a torch.distributed.ReduceOp; None if they have none."""
    return _REDUCE_OPS.get(op.op)


def waited_for(x: Tensor) -> Tensor:
    """The result of a functional collective, once it is there: eager code may pass one on as it is."""
    return x.trigger_wait() if type(x) is AsyncCollectiveTensor else x


def why_left(group_size: int, call: GroupCall) -> str | None:
    """Why weft leaves the call to the group's own backend, by what all ranks share; None if it takes it.

    What is refused there goes there, too: sizes that are not the collective's, two dtypes, tensors on two devices.
    """
    x, out = call.x, call.out
    whole = x if call.name == REDUCE_SCATTER else out
    if type(x) not in _PLAIN or type(out) not in _PLAIN:
        return "a tensor of a type of its own"
    if x.layout is not torch.strided or out.layout is not torch.strided:
        return "a sparse tensor"
    if call.name in _MOVED:
        if x.is_complex() or x.is_quantized:
            return str(x.dtype).removeprefix("torch.")
    elif x.dtype not in _REDUCED:
        return str(x.dtype).removeprefix("torch.")
    if not x.numel():
        return "nothing to send"
    if x is not out:
        parts = (x, out) if call.name == ALL_GATHER else (out, x)
        alike = x.dtype == out.dtype and x.device == out.device
        if call.name == ALL_TO_ALL:
            fit = x.numel() == out.numel() and not any(t.dim() < 1 or t.shape[0] % group_size for t in parts)
        else:
            fit = parts[0].numel() * group_size == parts[1].numel()
        if not alike or not fit:
            return "arguments that do not fit each other"
    most = MOST_EXCHANGED if call.name == ALL_TO_ALL and group_size > 2 else MOST_BYTES
    if whole.nbytes > most:
        return f"more than {most >> 20} MiB"
    if x.is_cuda and not (_as_nccl_takes_it(x) and _as_nccl_takes_it(out)):
        return "a tensor that is not contiguous"  # NCCL refuses it before it sends anything
    return None


def _as_nccl_takes_it(x: Tensor) -> bool:
    return x.is_contiguous() or x.is_contiguous(memory_format=_FORMATS.get(x.dim(), torch.contiguous_format))


def flat(x: Tensor) -> Tensor | None:
    """x's elements as they lie in memory, as NCCL takes them; None if there are others in between."""
    x = x.detach()
    if x.is_contiguous():
        return x.view(-1)
    return x.as_strided((x.numel(),), (1,)) if torch.ops.aten.is_non_overlapping_and_dense(x) else None


def index_of(x: Tensor) -> int:
    """Of its CUDA device; -1: the CPU."""
    return cuda_state.state.index_of(x)
