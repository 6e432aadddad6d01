"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.jit.program import Program
from ..moe_dispatch.reference import ExpertRanks
from .reference import MOST_EXPERTS

SOURCE = Path(__file__).parent / "kernel.cu"
_BLOCKS, _THREADS = 8, 512  # as in kernel.cu
_IDS = {torch.int32: "int", torch.int64: "long"}


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("ids", "rows", "offs", "slots", "ranks", "note")),
        *((name, ctypes.c_int32) for name in ("first", "count", "choices", "k", "experts", "capacity", "align")),
    )


def shared_bytes(counted: int, count: int) -> int:
    """Of a block that counts so many experts and sorts those of ``count``."""
    return 4 * ((_THREADS // 32 + 2) * counted + count + 1)


@cache
def route_program(dtype: torch.dtype) -> Program:
    """Of ids of this dtype, int32 or int64."""
    return Program(SOURCE, defines={"ID": _IDS[dtype]})


def _launch(name: str, ids: Tensor, results: Sequence[int], sizes: Sequence[int], shared: int) -> None:
    params = _Params(ids.data_ptr(), *results, *sizes)
    most = shared_bytes(MOST_EXPERTS, MOST_EXPERTS)
    function = route_program(ids.dtype).function(name, shared=most)
    function.launch(_BLOCKS, _THREADS, params, current_stream_of(ids), shared)


def launch_route(ids: Tensor, first_expert: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference_route``, on the current stream of the current device. ``ids`` is contiguous."""
    rows, slots = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty(count, dtype=torch.int32)
    results = *(x.data_ptr() for x in (rows, offs, slots)), 0, 0
    sizes = first_expert, count, ids.numel(), ids.shape[1], count, ids.numel(), 1
    _launch("moe_route", ids, results, sizes, shared_bytes(count, count))
    return rows, offs, slots


def launch_dispatch_route(
    ids: Tensor, of: ExpertRanks, capacity: int, note: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first four of ``rows_by_expert``, likewise. ``note``: of overflow.py, in pinned memory."""
    (tokens, k), count = ids.shape, of.each
    made = offs, slots, choices, ranks = (
        ids.new_empty(count, dtype=torch.int32),
        ids.new_empty(ids.shape, dtype=torch.int32),
        ids.new_empty(capacity, dtype=torch.int32),
        ids.new_empty(tokens, dtype=torch.int32),
    )
    results = [x.data_ptr() for x in (choices, offs, slots, ranks, note)]
    sizes = of.first, count, ids.numel(), k, of.num_experts, capacity, of.align
    _launch("moe_dispatch_route", ids, results, sizes, shared_bytes(of.num_experts, count))
    return made
