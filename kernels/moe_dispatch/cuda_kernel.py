"""Launches kernel.cu on contiguous CUDA tensors."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from ..device.collective.combine import choice_defines
from ..device.collective.launch import rounds_defines
from ..device.collective.rounds import RoundsConfig, rounds_launch
from ..device.comm import ll_exchange
from ..device.comm.ll_exchange import ExchangeSlots, ExchangeWorkspace, slots_of
from ..device.jit.program import Function, Program
from ..moe_route import cuda_kernel as route
from .configs import MoeProblem
from .reference import ExpertRanks

SOURCE = Path(__file__).with_name("kernel.cu")


class MoeParams(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *((name, ctypes.c_uint64) for name in ("out", "given", "index", "ranks", "more", "offs")),
        *((name, ctypes.c_uint32) for name in ("vectors", "room", "row", "tokens", "rows", "experts")),
    )


def moe_defines(world_size: int, dtype: torch.dtype, choices: int, wide: bool) -> dict[str, str | int]:
    """What kernel.cu must know, in addition to the rank."""
    of = choice_defines((choices, wide, False))
    return {"DTYPE": ll_exchange.DTYPES[dtype], **rounds_defines(world_size), **of}


@cache
def moe_program(
    world_size: int, rank: int, defined: tuple[torch.dtype, int, bool], *, dependent: bool = False
) -> Program:
    """kernel.cu for one rank. ``dependent``: to be launched so (ll_exchange.py)."""
    of_rank = {"RANK": rank, "DEPENDENT": int(dependent)}
    return Program(SOURCE, defines=moe_defines(world_size, *defined) | of_rank)


def launched_moe(world_size: int, rank: int, defined: tuple[torch.dtype, int, bool]) -> Program:
    """The one that this process launches."""
    return moe_program(world_size, rank, defined, dependent=ll_exchange.dependent())


class MoeLauncher:
    """One way on one workspace and one problem: prepared once, launched often.

    Args:
        place: a workspace with room for ``rounds_layout``; the same call site on every rank.
        config: the same on every rank.

    Attributes:
        grids: the blocks of a launch, once for each epoch that it takes.
    """

    def __init__(self, place: ExchangeWorkspace, problem: MoeProblem, config: RoundsConfig) -> None:
        self.problem = problem
        launch = rounds_launch(problem.vectors, place.layout, config)
        self.grids = (launch.blocks,) * launch.epochs
        self._params = MoeParams(slots_of(place))
        self._params.vectors, self._params.room = problem.vectors, launch.room
        self._params.row, self._params.tokens, self._params.rows = problem.row, problem.tokens, problem.rows
        self._params.experts = problem.experts
        program = launched_moe(place.layout.world_size, place.rank, problem.defined)
        function: Function = program.function(f"{problem.way}_{launch.kernel}")
        self._bound = function.bound(
            launch.blocks, launch.threads, self._params, dependent=ll_exchange.dependent()
        )
        self._lock = threading.Lock()  # a launch takes what stands in its struct

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """The whole exchange. Safe to capture in a CUDA graph. The current device must be that of the tensors.

        Args:
            buffer: not used; epochs alternate by themselves.
            operands: addresses of x, slots and ranks, and choices and offs where experts' rows are filled up; or of y,
                slots, ranks and weights: contiguous tensors, multiples of 16.
            results: that of the result, likewise.
            timeout_ns: nanoseconds until a wait for a peer expires, see the workspace's record.
            stream: a CUstream as an integer.

        Raises:
            RuntimeError: the kernel cannot be launched.
        """
        with self._lock:
            self._params.slots.watch.timeout_ns = timeout_ns
            struct.pack_into(f"{1 + len(operands)}Q", self._params, MoeParams.out.offset, *results, *operands)
            self._bound(stream)


class DispatchLauncher:
    """Routes all ranks' tokens (moe_route/kernel.cu) and sends them; prepared and launched likewise.

    Args:
        of: whose experts are where.
        ids: dtype of the ids.
        note: of overflow.py, in pinned memory.
    """

    def __init__(
        self,
        moe: MoeLauncher,
        place: ExchangeWorkspace,
        of: ExpertRanks,
        ids: torch.dtype,
        note: torch.Tensor,
    ) -> None:
        self._moe, self._note, problem = moe, note, moe.problem
        self.grids = (route.BLOCKS, *moe.grids)
        choices = of.world_size * problem.tokens * problem.choices
        sizes = of.first, of.each, choices, problem.choices, of.num_experts, problem.rows, of.align
        self._params = route.DispatchRouteParams(
            slots_of(place), route.RouteParams(note.data_ptr(), *(0,) * 5, *sizes)
        )
        program = route.dispatch_route_program(of.world_size, place.rank, ids)
        function: Function = program.function("moe_dispatch_route", shared=route.MOST_SHARED)
        shared = route.shared_bytes(of.num_experts, of.each)
        self._bound = function.bound(route.BLOCKS, route.THREADS, self._params, shared)
        self._lock = threading.Lock()

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """As ``MoeLauncher.launch``.

        Args:
            operands: addresses of x and this rank's ids.
            results: those of rows, offs, slots, choices and ranks.
        """
        (x, ids), (rows, offs, slots, choices, ranks) = operands, results
        at = route.DispatchRouteParams.route.offset + route.RouteParams.ids.offset
        with self._lock:
            self._params.exchange.watch.timeout_ns = timeout_ns
            struct.pack_into("5Q", self._params, at, ids, choices, offs, slots, ranks)
            self._bound(stream)
        self._moe.launch(buffer, (x, slots, ranks, choices, offs), (rows,), timeout_ns, stream)
