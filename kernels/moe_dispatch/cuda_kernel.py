"""Launches kernel.cu on contiguous CUDA tensors."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from ..device.collective.combine import choice_defines
from ..device.collective.launch import rounds_defines
from ..device.collective.rounds import RoundsConfig, rounds_launch
from ..device.comm import ll_exchange
from ..device.comm.ll_exchange import ExchangeSlots, ExchangeWorkspace, slots_of
from ..device.jit.program import Function, Program, fields
from .configs import MoeProblem

SOURCE = Path(__file__).with_name("kernel.cu")


class MoeParams(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *fields(ctypes.c_uint64, "out given index ranks more offs ids"),
        *fields(ctypes.c_uint32, "vectors room row tokens rows experts each words"),
    )


def moe_defines(world_size: int, dtype: torch.dtype, choices: int, wide: bool) -> dict[str, str | int]:
    """What kernel.cu must know, in addition to the rank."""
    of = choice_defines((choices, wide, False))
    return {"DTYPE": ll_exchange.DTYPES[dtype], **rounds_defines(world_size), **of}


def moe_program(world_size: int, rank: int, defined: tuple[torch.dtype, int, bool]) -> Program:
    """kernel.cu for one rank."""
    return ll_exchange.exchange_program(SOURCE, rank, moe_defines(world_size, *defined))


class MoeLauncher:
    """One way on one workspace and one problem: prepared once, launched often.

    Args:
        place: a workspace with room for ``rounds_layout``; the same call site on every rank.
        config: the same on every rank.

    Attributes:
        grids: the blocks of a launch, once for each epoch that it takes.
    """

    def __init__(self, place: ExchangeWorkspace, problem: MoeProblem, config: RoundsConfig) -> None:
        launch = rounds_launch(problem.vectors, place.layout, config)
        self.grids = (launch.blocks,) * launch.epochs
        self._params = MoeParams(slots_of(place))
        self._params.vectors, self._params.room = problem.vectors, launch.room
        self._params.row, self._params.tokens, self._params.rows = problem.row, problem.tokens, problem.rows
        self._params.experts = problem.experts
        by_ids = problem.sends_by_ids
        if by_ids is not None:
            self._params.each, self._params.words, _ = by_ids
        program = moe_program(place.layout.world_size, place.rank, problem.defined)
        function: Function = program.function(f"{problem.way}_{launch.kernel}")
        early = by_ids is not None or ll_exchange.dependent()
        self._bound = function.bound(launch.blocks, launch.threads, self._params, dependent=early)
        self._lock = threading.Lock()  # a launch takes what stands in its struct

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """The whole exchange, as ``ExchangeLauncher.launch``.

        Args:
            operands: addresses of x, slots and ranks, choices and offs where experts' rows are filled up, and this
                rank's ids where it sends by them; or of y, slots, ranks and weights: contiguous, multiples of 16.
            results: that of the result, likewise.
        """
        with self._lock:
            self._params.slots.watch.timeout_ns = timeout_ns
            struct.pack_into(f"{1 + len(operands)}Q", self._params, MoeParams.out.offset, *results, *operands)
            self._bound(stream)
