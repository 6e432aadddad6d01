"""Launches stand-alone collectives on contiguous CUDA tensors: the host's side of slices.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comm.exchange_launcher import ExchangeLauncher
from ..comm.ll_exchange import (
    DTYPES,
    VECTOR,
    ExchangeSlots,
    ExchangeWorkspace,
    at_once,
    exchange_program,
    slots_of,
    workers,
)
from ..jit.program import Function, Program, fields
from .combine import choice_defines
from .rounds import RoundsConfig, rounds_launch

MOST_BYTES = 1 << 30  #: of a part: kernels count them in 32 bits, rounded up to a pass of all blocks
_UNITS = (VECTOR, 4, 2, 1)


class Slices(ctypes.Structure):
    """The twin of ``weft::Slices`` in slices.cuh."""

    _fields_ = (("first", ctypes.c_uint64), *fields(ctypes.c_uint32, "row bytes parts unit"))


class CollectiveParams(ctypes.Structure):
    """The twin of ``Params`` in the kernels' files."""

    _fields_ = (
        ("slots", ExchangeSlots),
        ("x", Slices),
        ("out", Slices),
        *fields(ctypes.c_uint32, "vectors room"),
    )


@dataclass(frozen=True)
class SlicesProblem:
    """What is moved: a part of so many ``bytes`` for each rank, as it lies in x and in out.

    ``x_row``, ``out_row``: bytes of a part's row in x and in out, tensors [rows, W, row]; None: that is the part alone.
    """

    bytes: int
    x_row: int | None
    out_row: int | None

    def __post_init__(self) -> None:
        if not 1 <= self.bytes <= MOST_BYTES:
            raise ValueError(f"a part of {self.bytes} bytes: must have from 1 to {MOST_BYTES} bytes")
        for row in self.rows:
            if row < 1 or self.bytes % row:
                raise ValueError(f"rows of {row} bytes: must make up a part of {self.bytes} bytes")

    @property
    def rows(self) -> list[int]:
        """Bytes of each kind of row."""
        return [row for row in (self.x_row, self.out_row) if row is not None]

    @property
    def vectors(self) -> int:
        """Of a part."""
        return -(-self.bytes // VECTOR)

    def slices(self, world_size: int) -> tuple[Slices, Slices]:
        """Of x and out."""
        # What is alone is one row: it has no rows of others in between.
        x, out = (
            Slices(0, self.bytes, self.bytes, 1) if row is None else Slices(0, row, self.bytes, world_size)
            for row in (self.x_row, self.out_row)
        )
        return x, out


def rounds_defines(world_size: int) -> dict[str, str | int]:
    """What rounds.cuh must know."""
    return {"WORLD_SIZE": world_size, "WORKERS": workers(world_size), "AT_ONCE": at_once(world_size)}


def reduction_program(
    source: Path,
    world_size: int,
    rank: int,
    dtype: torch.dtype,
    reduce_op: str,
    choices: tuple[int, bool, bool] | None = None,
) -> Program:
    """A kernel.cu that reduces, for one rank, dtype and operation. ``choices``: of a CombineShape, if x is put
    together."""
    of = {"DTYPE": DTYPES[dtype], "REDUCE": reduce_op}
    return exchange_program(source, rank, {**of, **rounds_defines(world_size), **choice_defines(choices)})


class CollectiveLauncher(ExchangeLauncher[CollectiveParams]):
    """One of these ops. Its operand is x, its result is out: contiguous tensors, aligned like their elements.

    The part of the other that lies where the one will be may be the other itself; they must not overlap else.

    Args:
        place: a workspace with room for ``rounds_layout``; the same call site on every rank.
        function: returns the kernel of a name, on the device of the tensors.
        config: the same on every rank.
    """

    def __init__(
        self,
        place: ExchangeWorkspace,
        problem: SlicesProblem,
        function: Callable[[str], Function],
        config: RoundsConfig,
    ) -> None:
        super().__init__()
        layout = place.layout
        launch = rounds_launch(problem.vectors, layout, config)
        self.grids = (launch.blocks,) * launch.epochs
        self._any_unit = max(unit for unit in _UNITS[1:] if not any(row % unit for row in problem.rows))
        # Whole vectors at aligned addresses are a kernel of their own.
        self._has_whole = not any(row % VECTOR for row in problem.rows)
        for name in (f"{launch.kernel}_any", *([launch.kernel] if self._has_whole else ())):
            params = CollectiveParams(slots_of(place), *problem.slices(layout.world_size))
            params.vectors, params.room = problem.vectors, launch.room
            self._prepare(function(name), launch.blocks, launch.threads, params)

    def _put(self, operands: Sequence[int], results: Sequence[int]) -> Callable[[int], None]:
        (x,), (out,) = operands, results
        whole = self._has_whole and (x | out) % VECTOR == 0
        params = self._params[whole]
        params.x.first, params.out.first = x, out
        if not whole:
            unit = self._any_unit
            while (x | out) % unit:
                unit //= 2
            params.x.unit = params.out.unit = unit
        return self._launches[whole]
