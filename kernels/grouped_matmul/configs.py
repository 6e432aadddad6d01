"""Which tile a grouped product takes: a pure function of what the host knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device.gemm.gemm_tiles import TILES, Tile, tiles_of

MOST_EXPERTS = 2048  #: of a rank, whose steps lie in shared memory
_FEW_ROWS = 48  # of an expert, on average: tiles of 64 rows
_ALL_WIDE = 0.8  # of a tile's rows, on average: no expert has more than a tile
# Of a column of a stage that all SMs read from memory, and of a stage, on H200.
_READ_US, _STAGE_US = 0.0039, 0.02
_NARROWEST = 160  # of tiles of 128 rows: narrower ones load too much
_RASTER_GROUP = 8
_GATED = 64  # columns of a warpgroup are a multiple: half of them are whole sets of sums
# From how many bytes on copy engines send a rank's tokens: what their start and their flags cost is little then.
_LEAST_COPIED = 8 << 20


def sends_by_copies(m: int, k: int) -> bool:
    """Whether copy engines send a rank's tokens [m, K] of 16 bits while it works on those that are there."""
    return 2 * m * k >= _LEAST_COPIED


@dataclass(frozen=True)
class GroupedConfig:
    """Attributes:
    raster_group: pairs of rows of tiles of an expert that are computed column by column.
    gated: results are silu of products with the first half of B's columns, times those with the second.
    """

    tile: Tile
    raster_group: int = _RASTER_GROUP
    gated: bool = False

    def shared(self, experts: int) -> int:
        """Bytes of shared memory."""
        return self.tile.shared + 4 * experts


def tiles_for(*, gated: bool, tensor_memory: bool) -> list[Tile]:
    """Those that ``choose_grouped`` chooses from."""
    return [tile for tile in tiles_of(tensor_memory) if not gated or tile.warpgroup_columns % _GATED == 0]


def choose_grouped(
    rows: int, experts: int, ns: Sequence[int], k: int, num_sms: int, tiles: Sequence[Tile] = TILES
) -> GroupedConfig:
    """For ``rows`` rows of so many experts, whose counts the host does not know: as if they had about the same."""
    each, clusters = rows / experts, max(1, num_sms // 2)
    narrow = [tile for tile in tiles if tile.block_m == 64] if each <= _FEW_ROWS else []
    candidates = narrow or [tile for tile in tiles if tile.block_m == 128 and tile.block_n >= _NARROWEST]

    def predicted_us(tile: Tile) -> float:
        columns, stage_us = sum(-(-n // tile.block_n) for n in ns), tile.stage_us
        pairs, wide = each / (2 * tile.block_m), 0.5  # of each expert, on average
        if each < _ALL_WIDE * tile.block_m:  # weights are read from memory once, for one step
            pairs, wide, stage_us = 0.0, 1.0, max(stage_us, _READ_US * tile.block_n + _STAGE_US)
        steps = min(experts, rows) * (pairs * columns + wide * -(-columns // 2))
        waves = max(1.0, steps / clusters + 0.5)  # the last one is half full, on average
        return waves * -(-k // 64) * stage_us

    return GroupedConfig(min(candidates, key=predicted_us))
