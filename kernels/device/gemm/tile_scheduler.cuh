// The order in which clusters compute tiles. Plain arithmetic: it is tested on the CPU as it is.

#pragma once

namespace weft {

// Row and column of a step. Raster groups of `raster_group` rows of steps are taken column by column: what a wave reads
// stays in L2.
__device__ __forceinline__ void grouped(int tile, int rows, int columns, int raster_group, int& row, int& column) {
    const int first = tile / (raster_group * columns) * raster_group;
    const int height = min(rows - first, raster_group);
    const int inside = tile % (raster_group * columns);
    row = first + inside % height;
    column = inside / height;
}

}  // namespace weft
