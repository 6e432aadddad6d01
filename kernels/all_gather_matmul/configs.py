"""How all_gather_matmul is run: the tile, its order, and in how many chunks a shard arrives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout
from ..device.tile_table import Tile, pick

_CHUNK_BYTES = 4 << 20  # a copy engine needs about that much to run at the links' speed
_MOST_CHUNKS = 8


@dataclass(frozen=True)
class Config:
    """``chunk_rows`` rows of a shard are announced by one flag, whole tiles or the shard; ``group_m`` rows of tiles
    are walked together."""

    tile: Tile
    group_m: int
    chunk_rows: int


def choose(m: int, n: int, k: int, world_size: int, dtype: torch.dtype, num_sms: int) -> Config:
    """The configuration for A shards [m, K] and B [K, N]. A pure function: all ranks choose alike.

    The last chunk is what nothing is computed behind, so chunks are as small as copies allow.
    """
    tile = pick(world_size, m, n, dtype, num_sms, tail=0.0)
    tile_rows = -(-m // tile.block_m)
    chunks = max(1, min(_MOST_CHUNKS, tile_rows, m * k * dtype.itemsize // _CHUNK_BYTES))
    rows_a_chunk = -(-tile_rows // chunks)
    return Config(tile, min(8, rows_a_chunk), rows_a_chunk * tile.block_m)


def flags_per_rank(m: int, config: Config) -> int:
    """Flags that one rank sets in a peer's workspace in one use: one for each chunk."""
    return -(-m // config.chunk_rows)


def layout(m: int, k: int, dtype: torch.dtype, world_size: int, config: Config) -> Layout:
    """The workspace of shards [m, K]: a half holds ``[W, m, K]``."""
    return Layout(world_size, flags_per_rank(m, config), world_size * m * k * dtype.itemsize)
