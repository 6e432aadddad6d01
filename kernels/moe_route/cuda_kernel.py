"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.comm.ll_exchange import ROUTE_BLOCKS, ExchangeSlots, ExchangeWorkspace, slots_of
from ..device.jit.program import Function, Program, fields, program_of
from .reference import MOST_EXPERTS

SOURCE = Path(__file__).parent / "kernel.cu"
THREADS = 512
_IDS = {torch.int32: "int", torch.int64: "long"}


class RouteSizes(NamedTuple):
    """Of ``choices`` ids, k of each token: those of this rank's ``own`` experts from ``first`` on, of ``experts`` in
    all, go to rows below ``capacity``; each expert's are filled up to a multiple of ``align``."""

    first: int
    own: int
    choices: int
    k: int
    experts: int
    capacity: int
    align: int


class RouteParams(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "note ids rows offs slots ranks"),
        *fields(ctypes.c_int32, " ".join(RouteSizes._fields)),
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


def dispatch_route_program(world_size: int, rank: int, dtype: torch.dtype) -> Program:
    """The same of all ranks' ids, for one rank."""
    of_rank: dict[str, Any] = {"WORLD_SIZE": world_size, "RANK": rank, "DTYPE": "float32", "DEPENDENT": 0}
    return program_of(SOURCE, **_defines(dtype), **of_rank)


def _defines(dtype: torch.dtype) -> dict[str, str | int]:
    return {"ID": _IDS[dtype], "CLUSTER": ROUTE_BLOCKS, "THREADS": THREADS}


def launch_route(ids: Tensor, first_expert: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference_route``, on the current stream of the current device. ``ids`` is contiguous."""
    rows, slots = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty(count, dtype=torch.int32)
    addresses = (x.data_ptr() for x in (ids, rows, offs, slots))
    sizes = RouteSizes(first_expert, count, ids.numel(), ids.shape[1], count, ids.numel(), 1)
    function = route_program(ids.dtype).function("moe_route", shared=MOST_SHARED)
    params = RouteParams(0, *addresses, 0, *sizes)
    function.launch(ROUTE_BLOCKS, THREADS, params, current_stream_of(ids), shared_bytes(count, count))
    return rows, offs, slots


class DispatchLauncher:
    """Gathers all ranks' ids and routes their tokens, and meanwhile has ``moe`` send these; prepared once, launched
    often.

    Args:
        moe: of moe_dispatch, on the same workspace.
        sizes: of all ranks' ids.
        dtype: of the ids.
        note: of overflow.py, in pinned memory.

    Attributes:
        grids: the blocks of each launch.
    """

    def __init__(
        self, moe: Any, place: ExchangeWorkspace, sizes: RouteSizes, dtype: torch.dtype, note: Tensor
    ) -> None:
        self._moe, self._note = moe, note
        self.grids = (moe.grids[0] + ROUTE_BLOCKS, *moe.grids[1:])  # the route's are behind the others
        route = RouteParams(note.data_ptr(), *(0,) * 5, *sizes)
        self._params = DispatchRouteParams(slots_of(place, moe.grids[0]), route)
        program = dispatch_route_program(place.layout.world_size, place.rank, dtype)
        function: Function = program.function("moe_dispatch_route", shared=MOST_SHARED)
        self._bound = function.bound(
            ROUTE_BLOCKS, THREADS, self._params, shared_bytes(sizes.experts, sizes.own)
        )
        self._lock = threading.Lock()  # a launch takes what stands in its struct

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """Both launches, as ``MoeLauncher.launch``.

        Args:
            operands: addresses of x and this rank's ids.
            results: those of rows, offs, slots, choices and ranks.
        """
        (x, ids), (rows, offs, slots, choices, ranks) = operands, results
        at = DispatchRouteParams.route.offset + RouteParams.ids.offset
        with self._lock:
            self._params.exchange.watch.timeout_ns = timeout_ns
            struct.pack_into("5Q", self._params, at, ids, choices, offs, slots, ranks)
            self._bound(stream)
        self._moe.launch(buffer, (x, slots, ranks, choices, offs, ids), (rows,), timeout_ns, stream)
