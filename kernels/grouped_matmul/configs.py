"""Which tile a grouped product takes: a pure function of what the host knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..device.gemm.gemm_tiles import TILES, Tile, waves

MOST_EXPERTS = 2048  #: of a rank, whose steps lie in shared memory
_FEW_ROWS = 96  # of an expert, on average: tiles of 64 rows, of which a cluster has two
_RASTER_GROUP = 8


@dataclass(frozen=True)
class GroupedConfig:
    """Attributes:
    raster_group: pairs of rows of tiles of an expert that are computed column by column.
    """

    tile: Tile
    raster_group: int = _RASTER_GROUP

    def shared(self, experts: int) -> int:
        """Bytes of shared memory."""
        return self.tile.shared + 4 * experts


def choose_grouped(rows: int, experts: int, n: int, k: int, num_sms: int) -> GroupedConfig:
    """For ``rows`` rows of so many experts, whose counts the host does not know: as if they had the same."""
    each = -(-rows // experts)
    candidates = [tile for tile in TILES if (tile.block_m == 64) == (each <= _FEW_ROWS)]

    def predicted_us(tile: Tile) -> float:
        tiles = 2 * -(-each // (2 * tile.block_m)) * min(experts, rows)
        return waves(tile, tiles, [n], num_sms) * -(-k // 64) * tile.stage_us

    return GroupedConfig(min(candidates, key=predicted_us))
