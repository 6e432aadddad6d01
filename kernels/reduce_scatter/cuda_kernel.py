"""kernel.cu, which collective/launch.py launches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from ..device.collective.launch import rounds_defines
from ..device.comm import ll_exchange
from ..device.jit.program import Program

SOURCE = Path(__file__).with_name("kernel.cu")


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
