"""Tiles of a matmul: their order, loads of B, and the split of a tile along N.

Shapes in names: ``BM``, ``BN``, ``BK`` are the tile's rows, columns and depth. Every descriptor has unit
dimensions in front (which rank, which batch), so that one descriptor serves all ranks and rows past the
end of one rank's part are clipped, not read from the next.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile. Raster groups of GROUP_M tile rows are taken column by column: what the blocks of
    one wave read stays small enough for the L2 cache."""
    raster_group = GROUP_M * tiles_n
    first = (tile // raster_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % raster_group) % rows, (tile % raster_group) // rows


@triton.jit
def load_b(b, depth, column, B_TRANSPOSED: tl.constexpr):
    """A [BK, BN] tile of B, which lies in memory as [K, N], or as [N, K] if B_TRANSPOSED."""
    if B_TRANSPOSED:
        tile = b.load([column, depth]).T
    else:
        tile = b.load([depth, column])
    return tile


@triton.jit
def cut(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a [BM, BN] tile. No data moves between threads."""
    return tile.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
