"""How matmul_reduce_scatter is run: the tile and its order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout
from ..device.tile_table import Tile, count, pick

# Behind its last tile a block waits for the peers' and adds them up: as long as a main loop of this depth.
_TAIL_DEPTH = 1800


@dataclass(frozen=True)
class Config:
    """``group_m`` rows of tiles are walked together."""

    tile: Tile
    group_m: int


def choose(
    m: int, n: int, k: int, world_size: int, dtype: torch.dtype, num_sms: int, batches: int = 1
) -> Config:
    """The configuration for A [L, W, m, K] and B [K, N]. A pure function: all ranks choose alike."""
    tile = pick(batches * world_size, m, n, dtype, num_sms, tail=_TAIL_DEPTH / k)
    return Config(tile, 4)


def flags_per_rank(m: int, n: int, config: Config, batches: int = 1) -> int:
    """Flags that one rank sets in a peer's workspace in one use: one for each tile."""
    return count(config.tile, batches, m, n)


def layout(m: int, n: int, dtype: torch.dtype, world_size: int, config: Config, batches: int = 1) -> Layout:
    """The workspace of results [L, m, N]: a half holds ``[W, L, m, N]``."""
    size = world_size * batches * m * n * dtype.itemsize
    return Layout(world_size, flags_per_rank(m, n, config, batches), size)
