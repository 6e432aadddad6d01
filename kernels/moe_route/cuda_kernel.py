"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.jit.program import Program
from .reference import MOST_EXPERTS

SOURCE = Path(__file__).parent / "kernel.cu"
_BLOCKS, _THREADS = 8, 512  # as in kernel.cu
_IDS = {torch.int32: "int", torch.int64: "long"}


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("ids", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("offs", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("choices", ctypes.c_int32),
        ("k", ctypes.c_int32),
    )


def shared_bytes(count: int) -> int:
    """Of a block, for so many experts."""
    return 4 * ((_THREADS // 32 + 2) * count + 1)


@cache
def route_program(dtype: torch.dtype) -> Program:
    """Of ids of this dtype, int32 or int64."""
    return Program(SOURCE, defines={"ID": _IDS[dtype]})


def launch_route(ids: Tensor, first_expert: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference_route``, on the current stream of the current device. ``ids`` is contiguous."""
    rows, slots = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty(count, dtype=torch.int32)
    addresses = (x.data_ptr() for x in (ids, rows, offs, slots))
    params = _Params(*addresses, first_expert, count, ids.numel(), ids.shape[1])
    shared = shared_bytes(count)
    function = route_program(ids.dtype).function("moe_route", shared=shared_bytes(MOST_EXPERTS))
    function.launch(_BLOCKS, _THREADS, params, current_stream_of(ids), shared)
    return rows, offs, slots
