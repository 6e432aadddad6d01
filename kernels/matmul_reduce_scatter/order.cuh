// Which tiles a cluster computes in which order; kernel.cu says why. Plain arithmetic: it is tested on the CPU as it is.
// `Params` has m, n, batches, band and watch.rank; BM, BN and WORLD_SIZE are defined.

#pragma once

#include "../device/walk.cuh"

namespace weft {

struct ScatterTile {
    int dst, index;  // of the tiles for one rank
    int batch, row, column;
    bool inside;
};

// Rows of tiles stand in a list: those for the peers, to each in turn, then the own ones. A step has a pair of neighbours
// of the list. A peer's tile (row, column) for this rank comes no later in its order than the own one here: what an own tile
// waits for is never behind another wait.
template <typename Params>
struct ScatterOrder {
    int rows, columns;  // of tiles, for one rank; rows of one batch
    int each;  // tiles for one rank
    int all, pairs;  // rows of the list

    __device__ explicit ScatterOrder(const Params& p) {
        rows = (p.m + BM - 1) / BM;
        columns = (p.n + BN - 1) / BN;
        each = p.batches * rows * columns;
        all = p.batches * rows * WORLD_SIZE;
        pairs = (all + 1) / 2;
    }

    __device__ int steps() const { return pairs * columns; }

    __device__ ScatterTile tile(const Params& p, int step, int block) const {
        ScatterTile t;
        int pair;
        grouped(step, pairs, columns, p.band, pair, t.column);
        const int place = 2 * pair + block, peers = WORLD_SIZE - 1, of_peers = all / WORLD_SIZE * peers;
        t.inside = place < all;  // a block without a tile loads for the other all the same, and rows past the end of A
        const bool own = place >= of_peers;
        const int row = own ? place - of_peers : place / peers;  // of tiles, of all batches
        t.dst = own ? p.watch.rank : (p.watch.rank + 1 + place % peers) % WORLD_SIZE;
        t.index = row * columns + t.column;
        t.batch = row / rows;
        t.row = t.inside ? row % rows : rows;
        return t;
    }
};

}  // namespace weft
