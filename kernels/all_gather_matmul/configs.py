"""How all_gather_matmul is run: the tile, its order, and in how many chunks a shard arrives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout
from ..device.tile_table import Tile, pick

# A copy engine takes some microseconds for each copy, and as many again for the flag behind it: a second chunk
# pays only for shards from this size on that take longer to arrive than the products before them.
_SPLIT_BYTES = 16 << 20
_LINK = 364e3  # bytes a microsecond, measured between H200s
_PRODUCTS = 350e6  # multiply-adds a microsecond


@dataclass(frozen=True)
class Config:
    """``chunk_rows`` rows of a shard are announced by one flag, whole tiles or the shard; ``group_m`` rows of tiles
    are walked together."""

    tile: Tile
    group_m: int
    chunk_rows: int


def choose(m: int, n: int, k: int, world_size: int, dtype: torch.dtype, num_sms: int) -> Config:
    """The configuration for A shards [m, K] and B [K, N]. A pure function: all ranks choose alike."""
    tile = pick(world_size, m, n, dtype, num_sms, tail=0.0)
    tile_rows = -(-m // tile.block_m)
    shard_bytes = m * k * dtype.itemsize
    waits = shard_bytes / _LINK > m * n * k / _PRODUCTS
    chunks = 2 if waits and shard_bytes >= _SPLIT_BYTES and tile_rows > 1 else 1
    rows_a_chunk = -(-tile_rows // chunks)
    return Config(tile, min(8, rows_a_chunk), rows_a_chunk * tile.block_m)


def pays(m: int, n: int, k: int, world_size: int, itemsize: int) -> bool:
    """Whether copy engines beat an all-gather in front of the product; ``n``: the columns of all Bs."""
    gathered = world_size * m * k * itemsize
    return gathered >= 32 << 20 or (gathered >= 4 << 20 and world_size * m * n * k / _PRODUCTS >= 80)


def flags_per_rank(m: int, config: Config) -> int:
    """Flags that one rank sets in a peer's workspace in one use: one for each chunk."""
    return -(-m // config.chunk_rows)


def layout(m: int, k: int, dtype: torch.dtype, world_size: int, config: Config) -> Layout:
    """The workspace of shards [m, K]: a half holds ``[W, m, K]``."""
    return Layout(world_size, flags_per_rank(m, config), world_size * m * k * dtype.itemsize)
