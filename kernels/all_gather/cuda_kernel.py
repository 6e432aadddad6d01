"""kernel.cu, which collective/launch.py launches: it moves bytes, of any dtype."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..device.collective.launch import rounds_defines
from ..device.comm import ll_exchange
from ..device.jit.program import Program

SOURCE = Path(__file__).with_name("kernel.cu")


def all_gather_defines(world_size: int) -> dict[str, str | int]:
    """What kernel.cu must know, in addition to the rank."""
    return {"DTYPE": "bfloat16", **rounds_defines(world_size)}


@cache
def all_gather_program(
    world_size: int, rank: int, *, dependent: bool = False, root: int | None = None
) -> Program:
    """kernel.cu for one rank. ``dependent``: to be launched so (ll_exchange.py). ``root``: who alone receives."""
    of_rank = {"RANK": rank, "DEPENDENT": int(dependent)} | ({} if root is None else {"ROOT": root})
    return Program(SOURCE, defines=all_gather_defines(world_size) | of_rank)


def launched_all_gather(world_size: int, rank: int, root: int | None = None) -> Program:
    """The one that this process launches."""
    return all_gather_program(world_size, rank, dependent=ll_exchange.dependent(), root=root)
