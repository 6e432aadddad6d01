"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.comm.ll_exchange import ExchangeSlots
from ..device.jit.program import Program
from .reference import MOST_EXPERTS

SOURCE = Path(__file__).parent / "kernel.cu"
BLOCKS, THREADS = 8, 512
_IDS = {torch.int32: "int", torch.int64: "long"}
_SIZES = "first", "count", "choices", "k", "experts", "capacity", "align"


class RouteParams(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("note", "ids", "rows", "offs", "slots", "ranks")),
        *((name, ctypes.c_int32) for name in _SIZES),
    )


class DispatchRouteParams(ctypes.Structure):
    """The twin of ``DispatchParams``."""

    _fields_ = (("exchange", ExchangeSlots), ("route", RouteParams))


def shared_bytes(counted: int, count: int) -> int:
    """Of a block that counts so many experts and sorts those of ``count``."""
    return 4 * ((THREADS // 32 + 2) * counted + count + 1)


MOST_SHARED = shared_bytes(MOST_EXPERTS, MOST_EXPERTS)


@cache
def route_program(dtype: torch.dtype) -> Program:
    """Of ids of this dtype, int32 or int64."""
    return Program(SOURCE, defines=_defines(dtype))


@cache
def dispatch_route_program(world_size: int, rank: int, dtype: torch.dtype) -> Program:
    """The same of all ranks' ids, for one rank."""
    of_rank: dict[str, str | int] = {
        "WORLD_SIZE": world_size,
        "RANK": rank,
        "DTYPE": "float32",
        "DEPENDENT": 0,
    }
    return Program(SOURCE, defines=_defines(dtype) | of_rank)


def _defines(dtype: torch.dtype) -> dict[str, str | int]:
    return {"ID": _IDS[dtype], "CLUSTER": BLOCKS, "THREADS": THREADS}


def launch_route(ids: Tensor, first_expert: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference_route``, on the current stream of the current device. ``ids`` is contiguous."""
    rows, slots = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty(count, dtype=torch.int32)
    addresses = (x.data_ptr() for x in (ids, rows, offs, slots))
    sizes = first_expert, count, ids.numel(), ids.shape[1], count, ids.numel(), 1
    function = route_program(ids.dtype).function("moe_route", shared=MOST_SHARED)
    params = RouteParams(0, *addresses, 0, *sizes)
    function.launch(BLOCKS, THREADS, params, current_stream_of(ids), shared_bytes(count, count))
    return rows, offs, slots
