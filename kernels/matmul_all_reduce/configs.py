"""How matmul_all_reduce is run on CUDA: in how many pieces of rows. A pure function, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Config:
    """``pieces``: of rows that are multiplied one after the other, each all-reduced beside the next one's product."""

    pieces: int = 1

    def __post_init__(self) -> None:
        if self.pieces < 1:
            raise ValueError(f"pieces: is {self.pieces}, must be 1 or more")


_FLOPS_PER_US = 700e6
_PIECES_FROM_US = 1000.0


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, world_size: int) -> Config:
    """The configuration for A [m, k] and B [k, n] on each rank; the same on every rank.

    Two pieces where the product is long, between two ranks. Elsewhere tiles that no longer fill the last wave, and an
    all-reduce that takes multiprocessors from the product beside it, cost more than is hidden: measured on 2 and 4 H200
    (4096 x 12288 @ 12288 x 12288 on 4: 2457 us in two pieces, 2085 for NCCL behind cuBLAS).
    """
    long = 2.0 * m * n * k >= _PIECES_FROM_US * _FLOPS_PER_US and m >= 1024
    return Config(2 if long and world_size == 2 else 1)


def rows_of(m: int, pieces: int) -> list[tuple[int, int]]:
    """[first, end) of each piece, in multiples of 128 rows but for the last."""
    step = -(-m // pieces // 128) * 128 if m >= pieces * 128 else m
    step = max(step, 1)
    return [(first, min(first + step, m)) for first in range(0, m, step)]
