"""``all_to_all_vdev``, ``all_to_all_vdev_2d`` and ``all_to_all_vdev_2d_offset`` of ``torch.ops.symm_mem`` on weft.

All ranks' splits are gathered; what follows from them is found on the device, and the rows go as those of
``moe_dispatch`` do, whose exchange has all that can fail. No size goes to the host, and tensors may lie in any memory.
On memory of NVSHMEM torch has kernels of its own, which keep such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as torch_symm
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.moe_dispatch.splits import Splits, rows_of_splits
from ...symm_mem import resolve_group
from ...symm_mem.heap.overflow import raise_noted, refuse_overflow
from .. import validation
from ..dispatch.plan import last_plan
from ..ops.experts.moe_dispatch import MOST_RANKS
from .calls_taken import counts

_NAMES = ("all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")
EXCHANGES = {name: getattr(torch.ops.symm_mem, name).default for name in _NAMES}
_ops = torch.ops.weft


class _Call(NamedTuple):
    """``given``, ``found``: the splits, and where those that arrive are written to. ``offset``: the given ones have
    offsets, and are written by expert."""

    input: Tensor
    out: Tensor
    given: Tensor
    found: Tensor
    group_name: str
    align: int
    offset: bool

    @property
    def flat(self) -> bool:
        """Whether there is one split for each rank."""
        return not self.offset and self.align == 0

    @property
    def given_name(self) -> str:
        return "in_splits_offsets" if self.offset else "in_splits"

    def validate(self) -> ProcessGroup:
        group, x, out = resolve_group(self.group_name), self.input, self.out
        size, splits = group.size(), self.given.shape[-1] if self.given.dim() else 0
        if size > MOST_RANKS:
            raise ValueError(f"group_name: has {size} ranks, must have at most {MOST_RANKS}")
        for name, tensor in (
            ("input", x),
            ("out", out),
            (self.given_name, self.given),
            ("out_splits_offsets", self.found),
        ):
            validation.same_device(name, tensor, x, "input")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: has strides {tensor.stride()}, must be contiguous")
        if x.dim() == 0 or x.shape[1:].numel() * x.element_size() % 2:
            raise ValueError(
                f"input: is {x.dtype} of {list(x.shape)}, must have rows of an even number of bytes"
            )
        if out.dtype != x.dtype or out.dim() == 0 or out.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"out: is {out.dtype} of {list(out.shape)}, must have rows like input, {x.dtype} of {list(x.shape)}"
            )
        shape = [2, splits] if self.offset else [splits]
        if list(self.given.shape) != shape or splits == 0 or splits % size or (self.flat and splits != size):
            must = f"{'2 rows and ' * self.offset}{'' if self.flat else 'a multiple of '}{size} splits"
            raise ValueError(f"{self.given_name}: has shape {list(self.given.shape)}, must have {must}")
        if list(self.found.shape) != [2, splits]:
            raise ValueError(
                f"out_splits_offsets: has shape {list(self.found.shape)}, must have {[2, splits]}"
            )
        for name, tensor in ((self.given_name, self.given), ("out_splits_offsets", self.found)):
            if tensor.dtype != torch.int64:
                raise TypeError(f"{name}: is {tensor.dtype}, must be torch.int64")
        return group

    def run(self) -> None:
        group, capacity = self.validate(), self.out.shape[0]
        raise_noted(self.group_name)
        size, splits = group.size(), self.given.shape[-1]
        every = _ops.one_shot_all_gather(self.given.flatten(), 0, self.group_name).view(size, -1, splits)
        of_all = Splits(every[:, 0], every[:, 1] if self.offset else None, not self.offset, self.align)
        found = rows_of_splits(of_all, group.rank(), self.input.shape[0], capacity)
        self._refuse(found.wrong, every)
        refuse_overflow(found.needed, capacity, self.group_name, "out.shape[0]")
        x, out = map(_as_16_bits, (self.input, self.out))
        rows = _ops.moe_dispatch_again(x, found.slots, found.choices, found.ranks, self.group_name)
        out.copy_(torch.where((found.choices >= 0)[:, None], rows, out))
        # Of rows that did not fit, which the host raises later, nothing may be sent back meanwhile.
        sizes = torch.where((found.needed <= capacity).all(), found.sizes, 0)
        self.found.copy_(torch.stack([sizes, found.starts]))

    def _refuse(self, wrong: Tensor, every: Tensor) -> None:
        """On CUDA as torch's kernels do: by an assertion of the device."""
        must = f"{self.given_name}: must not be negative, overlap, or go past the rows of input"
        if wrong.is_cuda:
            torch._assert_async(~wrong.any(), must)
        elif wrong.any():
            rank = int(wrong.nonzero()[0])
            raise ValueError(
                f"{must}, {self.input.shape[0]}; those of rank {rank} are {every[rank].tolist()}"
            )


def _as_16_bits(x: Tensor) -> Tensor:
    """[rows, numbers], of any dtype: the exchange moves them as they are."""
    numbers = x.shape[1:].numel()  # of one the stride may be any, as of as_bytes
    return x.as_strided((x.shape[0], numbers), (numbers, 1)).view(torch.uint8).view(torch.bfloat16)


def vdev_call(name: str, args: Sequence[Any]) -> _Call:
    """``args``: in the schema's order."""
    x, out, given, found, group_name, *more = args
    align = 0
    if name == "all_to_all_vdev_2d":
        align = more[0] if more and more[0] is not None else 1
        if align < 1:
            raise ValueError(f"major_align: is {align}, must be at least 1")
    return _Call(x, out, given, found, group_name, align, name == "all_to_all_vdev_2d_offset")


def exchange_on_weft(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """What the op then runs on CPU and CUDA, and for fake tensors."""
    key = f"symm_mem::{name}"
    has_own = torch._C._dispatch_has_kernel_for_dispatch_key(key, "CUDA")
    own = torch.library.get_kernel(key, "CUDA") if has_own else None

    def exchange(*args: Any) -> None:
        if own is not None and args[0].is_cuda and torch_symm.get_backend(args[0].device) == "NVSHMEM":
            counts[name, "torch", "memory of NVSHMEM"] += 1
            own.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args)
            return
        with torch.no_grad():
            vdev_call(name, args).run()
        plan = last_plan()
        counts[name, "weft", plan.reason if plan.algorithm == "unfused" else ""] += 1

    def on_meta(*args: Any) -> None:
        vdev_call(name, args).validate()

    return exchange, on_meta
