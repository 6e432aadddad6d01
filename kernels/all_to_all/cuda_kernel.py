"""kernel.cu, which collective/launch.py launches: it moves bytes, of any dtype."""

from __future__ import annotations

from pathlib import Path

from ..device.collective.launch import rounds_defines
from ..device.comm.ll_exchange import exchange_program
from ..device.jit.program import Program

SOURCE = Path(__file__).with_name("kernel.cu")


def all_to_all_program(world_size: int, rank: int) -> Program:
    """kernel.cu for one rank."""
    return exchange_program(SOURCE, rank, {"DTYPE": "bfloat16", **rounds_defines(world_size)})
