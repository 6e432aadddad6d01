"""kernel.cu, which collective/launch.py launches: it moves bytes, of any dtype."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from ...symm_mem.backends import cuda_state
from ..device.collective.launch import rounds_defines
from ..device.comm import ll_exchange
from ..device.jit.program import Function, Program

SOURCE = Path(__file__).with_name("kernel.cu")


def all_gather_defines(world_size: int) -> dict[str, str | int]:
    """What kernel.cu must know, in addition to the rank."""
    return {"DTYPE": "bfloat16", **rounds_defines(world_size)}


@cache
def all_gather_program(world_size: int, rank: int, *, dependent: bool = False) -> Program:
    """kernel.cu for one rank. ``dependent``: to be launched so (ll_exchange.py)."""
    of_rank = {"RANK": rank, "DEPENDENT": int(dependent)}
    return Program(SOURCE, defines=all_gather_defines(world_size) | of_rank)


def all_gather_function(world_size: int, rank: int, device: torch.device, name: str) -> Function:
    """A kernel of it, on a device."""
    with cuda_state.state.make_current(device):
        return all_gather_program(world_size, rank, dependent=ll_exchange.dependent()).function(name)
