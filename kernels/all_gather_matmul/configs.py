"""How all_gather_matmul is run: the tile, its order, and in how many chunks a shard arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout
from ..device import gemm_tiles
from ..device.tile_table import Tile, pick

# A copy engine takes some microseconds for each copy, and as many again for the flag behind it: a second chunk
# pays only for shards from this size on that take longer to arrive than the products before them.
_SPLIT_BYTES = 16 << 20
_LINK = 364e3  # bytes a microsecond, measured between H200s
_PRODUCTS = 350e6  # multiply-adds a microsecond
_BAND = 4  # pairs of rows of tiles: what a wave reads stays in the L2 cache


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


@dataclass(frozen=True)
class PushConfig:
    """How the kernel that sends by itself (kernel.cu) is run.

    ``senders`` blocks send pieces of ``piece_rows`` x ``piece_columns``; ``unit_columns`` of K are waited for at once; ``group`` rows of tiles of each rank are sent and multiplied
    together; ``band`` pairs of own rows of tiles and ``remote_band`` pairs of the peers' are walked together.
    """

    tile: gemm_tiles.Tile
    piece_rows: int
    piece_columns: int
    unit_columns: int
    senders: int
    group: int
    band: int
    remote_band: int


def choose_push(m: int, ns: Sequence[int], k: int, world_size: int, num_sms: int) -> PushConfig:
    """The configuration for A shards [m, K] and Bs [K, N_i] of 16 bits. A pure function: all ranks choose alike.

    A group is as many rows of tiles of all peers as keep every multiprocessor busy once: where the data is waited for,
    the tiles of the last group then advance together as it comes.
    """
    tile, _ = _push_tile(m, ns, k, world_size, num_sms)
    rows, columns, peers = -(-m // tile.block_m), sum(-(-n // tile.block_n) for n in ns), world_size - 1
    group = max(1, min(rows, round(num_sms / (peers * columns))))
    remote_band = max(_BAND, -(-group * peers // 2))
    return PushConfig(tile, 64, 64, 1024, 8, group, _BAND, remote_band)


def push_pays(m: int, ns: Sequence[int], k: int, world_size: int, num_sms: int) -> bool:
    """Whether that kernel is thought to beat an all-gather in front of the products."""
    moved = (world_size - 1) * m * k * 2
    _, product = _push_tile(m, ns, k, world_size, num_sms)
    return max(product, moved / _LINK) + 10 < gemm_tiles.unfused_us(world_size * m, sum(ns), k, moved)


def _push_tile(
    m: int, ns: Sequence[int], k: int, world_size: int, num_sms: int
) -> tuple[gemm_tiles.Tile, float]:
    return gemm_tiles.pick(lambda tile: world_size * -(-m // tile.block_m), ns, k, num_sms)


def push_flags_per_rank(m: int, k: int, config: PushConfig) -> int:
    """Flags that one rank sets in a peer's workspace in one use: one for each piece."""
    units = -(-m // config.tile.block_m) * -(-k // config.unit_columns)
    return units * (config.tile.block_m // config.piece_rows) * (config.unit_columns // config.piece_columns)


def push_layout(m: int, k: int, world_size: int, config: PushConfig) -> Layout:
    """The workspace of shards [m, K] of 16 bits: a half holds ``[W, m, K]``."""
    return Layout(world_size, push_flags_per_rank(m, k, config), world_size * m * k * 2)
