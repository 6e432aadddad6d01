"""What kernel.cu moves, its grid and its epochs. Pure functions, no GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.collective.combine import MOST_VECTORS
from ..device.collective.rounds import RoundsConfig, epoch_of
from ..device.comm.exchange_time import exchange_time_us
from ..device.comm.ll_exchange import BLOCKS, VECTOR
from ..moe_route.reference import BLOCKS as ROUTE_BLOCKS

MOST_RANKS = 8  #: whose vectors fit into a thread's registers
#: To the time of an all-reduce that sends as many bytes, as all-gathers and reduce-scatters have it. Not measured.
_TIME_RATIO = {"dispatch": 1.1, "combine": 1.05}


class MoeProblem(NamedTuple):
    """Tokens of each rank, of ``hidden`` numbers and ``choices`` experts each, and rows of this rank's experts.

    ``way``: "dispatch", or "combine"; ``wide``: weights of float32 beside 16 bits; ``experts``: of this rank, where
    their rows are filled up; ``by_ids``: experts of a rank, and words of an id, where a dispatch sends by them while
    its routes are found.
    """

    way: str
    tokens: int
    hidden: int
    rows: int
    choices: int
    dtype: torch.dtype
    wide: bool = True
    experts: int = 0
    by_ids: tuple[int, int] | None = None

    @property
    def row(self) -> int:
        """Vectors of a token."""
        return self.hidden * self.dtype.itemsize // VECTOR

    @property
    def vectors(self) -> int:
        """Of a rank's tokens."""
        return self.tokens * self.row

    @property
    def defined(self) -> tuple[torch.dtype, int, bool]:
        """What a program is made for."""
        return self.dtype, self.choices, self.wide

    def why_not(self, world_size: int) -> str | None:
        """Why there is no kernel for it; None if there is one."""
        if world_size > MOST_RANKS:
            return f"the kernel is for {MOST_RANKS} ranks at most"
        if self.hidden * self.dtype.itemsize % VECTOR:
            return f"rows of {self.hidden} x {self.dtype} are no multiple of {VECTOR} bytes"
        if world_size * self.vectors >= MOST_VECTORS:
            return f"{world_size} x {self.tokens} tokens have {MOST_VECTORS} times {VECTOR} bytes or more"
        return None


def choose_moe(problem: MoeProblem, world_size: int, num_sms: int) -> RoundsConfig:
    """The configuration; the same on every rank."""
    blocks = min(BLOCKS, num_sms)
    if problem.by_ids is not None:
        blocks = max(blocks - ROUTE_BLOCKS, 1)  # the others, and their slots, are the route's
    return RoundsConfig(epoch_of(world_size), blocks, exact=problem.way == "dispatch")


def estimate_moe_us(way: str, nbytes: int, world_size: int) -> float:
    """Microseconds if every rank needs all tokens, ``nbytes`` of each rank."""
    return exchange_time_us(_TIME_RATIO[way] * (world_size - 1) * nbytes)
