"""What kernel.cu moves, its grid and its epochs. Pure functions, no GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.collective.combine import MOST_VECTORS
from ..device.collective.rounds import RoundsConfig, epoch_of
from ..device.comm.exchange_time import exchange_time_us
from ..device.comm.ll_exchange import BLOCKS, VECTOR, WARP

MOST_RANKS = 8  #: whose vectors fit into a thread's registers
#: To the time of an all-reduce that sends as many bytes, as all-gathers and reduce-scatters have it. Not measured.
_TIME_RATIO = {"dispatch": 1.1, "combine": 1.05}


class Routed(NamedTuple):
    """Of a dispatch that sends by ids while its routes are found: experts of a rank, words of an id, and blocks of the
    kernel that finds them."""

    each: int
    words: int
    blocks: int


class MoeProblem(NamedTuple):
    """Tokens of each rank, of ``hidden`` numbers and ``choices`` experts each, and rows of this rank's experts.

    ``way``: "dispatch", or "combine"; ``wide``: weights of float32 beside 16 bits; ``experts``: of this rank, where
    their rows are filled up.
    """

    way: str
    tokens: int
    hidden: int
    rows: int
    choices: int
    dtype: torch.dtype
    wide: bool = True
    experts: int = 0
    routed: Routed | None = None

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

    @property
    def sends_by_ids(self) -> Routed | None:
        """How, if it does: a warp's lanes look at the ids of two tokens."""
        return self.routed if self.row >= WARP and self.choices <= WARP // 2 else None

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
    beside = 0 if problem.routed is None else problem.routed.blocks
    blocks = max(min(BLOCKS, num_sms) - beside, 1)
    dispatches = problem.way == "dispatch"  # rows that it stores take more of L2, and slots shall stay there
    return RoundsConfig(epoch_of(world_size) // (1 + dispatches), blocks, exact=dispatches)


def estimate_moe_us(way: str, nbytes: int, world_size: int) -> float:
    """Microseconds if every rank needs all tokens, ``nbytes`` of each rank."""
    return exchange_time_us(_TIME_RATIO[way] * (world_size - 1) * nbytes)
