"""kernel.cu, which collective/launch.py launches: it moves bytes, of any dtype."""

from __future__ import annotations

from pathlib import Path

from ..device.collective.launch import rounds_defines
from ..device.comm.ll_exchange import exchange_program
from ..device.jit.program import Program

SOURCE = Path(__file__).with_name("kernel.cu")


def all_gather_program(world_size: int, rank: int, root: int | None = None) -> Program:
    """kernel.cu for one rank. ``root``: who alone receives."""
    receiver = {} if root is None else {"ROOT": root}
    return exchange_program(SOURCE, rank, {"DTYPE": "bfloat16", **rounds_defines(world_size), **receiver})
