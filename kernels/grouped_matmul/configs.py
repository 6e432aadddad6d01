"""Which tile a grouped product takes: a pure function of what the host knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..device.gemm.gemm_tiles import TILES, Tile, waves

MOST_EXPERTS = 2048  #: of a rank, whose steps lie in shared memory
_FEW_ROWS = 96  # of an expert, on average: tiles of 64 rows, of which a cluster has two
_RASTER_GROUP = 8


# Rows by index cost a product up to half of its time, a copy before it the time of its bytes: of narrow products with
# many rows more (2 H200: K = 2048, N = 768, 65,536 rows: 447 us by index, 356 and 118 of a copy).
_NARROW, _MANY_ROWS = 1024, 32768


def takes_by_index(rows: int, n: int) -> bool:
    """Whether the kernel takes rows of A by index; otherwise they are copied into their order before it."""
    return n <= _NARROW and rows >= _MANY_ROWS


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
