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
_LINK_BYTES_PER_US = 330e3
_PIECE_COST_US = 12.0  # of one piece more: two launches, and tiles that no longer fill the last wave


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, world_size: int, itemsize: int) -> Config:
    """The configuration for A [m, k] and B [k, n] on each rank; the same on every rank.

    With p pieces the longer of product and all-reduce hides the other but for one piece of it.
    """
    product = 2.0 * m * n * k / _FLOPS_PER_US
    reduce = 2.0 * (world_size - 1) / world_size * m * n * itemsize / _LINK_BYTES_PER_US

    def time(pieces: int) -> float:
        return max(product, reduce) + min(product, reduce) / pieces + _PIECE_COST_US * (pieces - 1)

    return Config(min((p for p in (1, 2, 4) if p == 1 or m // p >= 512), key=time))


def rows_of(m: int, pieces: int) -> list[tuple[int, int]]:
    """[first, end) of each piece, in multiples of 128 rows but for the last."""
    step = -(-m // pieces // 128) * 128 if m >= pieces * 128 else m
    step = max(step, 1)
    return [(first, min(first + step, m)) for first in range(0, m, step)]
