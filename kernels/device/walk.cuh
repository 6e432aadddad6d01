// The order in which clusters walk through a product. Plain arithmetic: it is tested on the CPU as it is.

#pragma once

namespace weft {

// Row and column of a step. Bands of `band` rows of steps are walked column by column: what a wave reads stays in L2.
__device__ __forceinline__ void grouped(int tile, int rows, int columns, int band, int& row, int& column) {
    const int first = tile / (band * columns) * band;
    const int height = min(rows - first, band);
    const int inside = tile % (band * columns);
    row = first + inside % height;
    column = inside / height;
}

}  // namespace weft
