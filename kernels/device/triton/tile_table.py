"""The tiles of Triton kernels: a table, and the choice among them, a pure function."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TritonTile:
    """A tile and how a block computes it.

    ``chunks``: the chunks along N in which the finished tile is stored, so that staging it costs less shared memory
    and fewer registers. ``speed``: relative to the fastest tile, when all SMs work.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    chunks: int
    speed: float


# For 132 SMs of Hopper. float32 is multiplied without tensor cores, from registers: only a small tile fits.
_HALF_PRECISION = (
    TritonTile(128, 256, 64, warps=8, stages=3, chunks=2, speed=1.0),
    TritonTile(128, 128, 64, warps=8, stages=4, chunks=2, speed=0.85),
    TritonTile(64, 256, 64, warps=8, stages=4, chunks=2, speed=0.75),
    TritonTile(64, 128, 64, warps=4, stages=4, chunks=2, speed=0.6),
)
_SINGLE_PRECISION = (TritonTile(64, 64, 16, warps=8, stages=3, chunks=2, speed=1.0),)


def tiles(dtype: torch.dtype) -> tuple[TritonTile, ...]:
    """The tiles to choose from."""
    return _SINGLE_PRECISION if dtype == torch.float32 else _HALF_PRECISION


def count_tiles(tile: TritonTile, parts: int, m: int, n: int) -> int:
    """Tiles of ``parts`` matrices of [m, n]; no tile lies in two of them."""
    return parts * -(-m // tile.block_m) * -(-n // tile.block_n)


def pick(parts: int, m: int, n: int, dtype: torch.dtype, num_sms: int, tail: float) -> TritonTile:
    """The tile that is done first, if every SM computes one after the other.

    Args:
        parts, m, n: the product is ``parts`` matrices of [m, n].
        num_sms: SMs that the kernel may use.
        tail: what follows the last tile, in tiles.
    """

    def time(tile: TritonTile) -> float:
        waves = -(-count_tiles(tile, parts, m, n) // num_sms)
        return (waves + tail) * tile.block_m * tile.block_n / tile.speed

    return min(tiles(dtype), key=time)
