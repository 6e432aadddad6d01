"""kernel.cu, which collective/launch.py launches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..device.collective.combine import CombinedSum, CombineLauncher, CombineSource
from ..device.collective.launch import CollectiveParams, Slices, SlicesProblem, reduction_program
from ..device.collective.rounds import RoundsConfig, rounds_launch
from ..device.comm.ll_exchange import ExchangeWorkspace, slots_of

SOURCE = Path(__file__).with_name("kernel.cu")


class _CombineParams(CollectiveParams):
    """The twin of ``Params`` in kernel.cu with CHOICES."""

    _fields_: ClassVar[Any] = (("combine", CombineSource),)


reduce_scatter_program = partial(reduction_program, SOURCE)  #: kernel.cu for one rank, dtype and operation


def combine_reduce_scatter_launcher(
    place: ExchangeWorkspace, wanted: CombinedSum, dim: int, config: RoundsConfig
) -> CombineLauncher:
    """The reduce-scatter of what is put together.

    Args:
        place: a workspace with room for ``rounds_layout``; the same call site on every rank.
        dim: the dimension that is cut; a part has rows of whole vectors.
    """
    layout = place.layout
    problem = scatter_problem(wanted, dim, layout.world_size)
    launch = rounds_launch(problem.vectors, layout, config)
    program = reduce_scatter_program(layout.world_size, place.rank, *wanted.defined)
    params = _CombineParams(slots_of(place), *problem.slices(layout.world_size))
    params.vectors, params.room = problem.vectors, launch.room
    params.combine = wanted.source
    result = _CombineParams.out.offset + Slices.first.offset
    return CombineLauncher(params, result, program.function(launch.kernel), launch)


def scatter_problem(wanted: CombinedSum, dim: int, world_size: int) -> SlicesProblem:
    tokens, hidden = wanted.tokens, wanted.hidden
    row = hidden // world_size if dim else tokens // world_size * hidden
    size = wanted.dtype.itemsize
    return SlicesProblem(tokens * hidden // world_size * size, row * size, None)
