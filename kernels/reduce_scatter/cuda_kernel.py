"""kernel.cu, which collective/launch.py launches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..device.collective.combine import CombineLauncher, CombineShape, CombineSource
from ..device.collective.launch import CollectiveParams, Slices, SlicesProblem, rounds_defines
from ..device.collective.rounds import RoundsConfig, rounds_launch
from ..device.comm import ll_exchange
from ..device.comm.ll_exchange import VECTOR, ExchangeWorkspace, slots_of
from ..device.jit.program import Program

SOURCE = Path(__file__).with_name("kernel.cu")


class _CombineParams(CollectiveParams):
    """The twin of ``Params`` in kernel.cu with CHOICES."""

    _fields_: ClassVar[Any] = (("combine", CombineSource),)


def reduce_scatter_defines(world_size: int, dtype: str, reduce_op: str) -> dict[str, str | int]:
    """What kernel.cu must know, in addition to the rank."""
    return {"DTYPE": dtype, "REDUCE": reduce_op, **rounds_defines(world_size)}


@cache
def reduce_scatter_program(
    world_size: int, rank: int, dtype: torch.dtype, reduce_op: str, *, dependent: bool = False
) -> Program:
    """kernel.cu for one rank, dtype and operation. ``dependent``: to be launched so (ll_exchange.py)."""
    of_rank = {"RANK": rank, "DEPENDENT": int(dependent)}
    return Program(
        SOURCE, defines=reduce_scatter_defines(world_size, ll_exchange.DTYPES[dtype], reduce_op) | of_rank
    )


def launched_reduce_scatter(world_size: int, rank: int, dtype: torch.dtype, reduce_op: str) -> Program:
    """The one that this process launches."""
    return reduce_scatter_program(world_size, rank, dtype, reduce_op, dependent=ll_exchange.dependent())


@cache
def combine_reduce_scatter_program(
    world_size: int,
    rank: int,
    dtype: torch.dtype,
    choices: tuple[int, bool, bool],
    *,
    dependent: bool = False,
) -> Program:
    """kernel.cu for sums of what is put together while it is loaded. ``choices``: those of a CombineShape."""
    defines = reduce_scatter_defines(world_size, ll_exchange.DTYPES[dtype], "sum")
    defines |= CombineShape(0, *choices).defines
    return Program(SOURCE, defines=defines | {"RANK": rank, "DEPENDENT": int(dependent)})


def launched_combine_reduce_scatter(
    ranks: tuple[int, int], dtype: torch.dtype, shape: CombineShape
) -> Program:
    """The one that this process launches. ``ranks``: how many, and which this is."""
    return combine_reduce_scatter_program(*ranks, dtype, shape[1:], dependent=ll_exchange.dependent())


def combine_reduce_scatter_launcher(
    place: ExchangeWorkspace,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    shape: CombineShape,
    config: RoundsConfig,
) -> CombineLauncher:
    """The reduce-scatter of what is put together, of [tokens, hidden], along a dimension.

    Args:
        place: a workspace with room for ``rounds_layout``; the same call site on every rank.
        sizes: tokens, hidden and the dimension; a part has rows of whole vectors.
    """
    layout, (tokens, hidden, _) = place.layout, sizes
    problem = scatter_problem(sizes, dtype, layout.world_size)
    launch = rounds_launch(problem.vectors, layout, config)
    function = launched_combine_reduce_scatter((layout.world_size, place.rank), dtype, shape).function(
        launch.kernel
    )
    params = _CombineParams(slots_of(place, 0), *problem.slices(layout.world_size))
    params.vectors, params.room = problem.vectors, launch.room
    params.combine = shape.source(tokens, hidden * dtype.itemsize // VECTOR)
    ready = function.bound(launch.blocks, launch.threads, params, dependent=ll_exchange.dependent())
    result = _CombineParams.out.offset + Slices.first.offset
    return CombineLauncher(params, result, ready, (launch.blocks,) * launch.epochs)


def scatter_problem(sizes: tuple[int, int, int], dtype: torch.dtype, world_size: int) -> SlicesProblem:
    """Of tokens, hidden and the dimension."""
    tokens, hidden, dim = sizes
    rows, row = (tokens, hidden // world_size) if dim else (1, tokens // world_size * hidden)
    return SlicesProblem(rows, row * dtype.itemsize, gathers=False)
