// The tile scheduler: which tiles a cluster computes in which order. Plain arithmetic: it is tested on the CPU as it
// is. `Params` has m, n, batches, raster_group and watch.rank; BM, BN, WORLD_SIZE and SPLIT_N are defined.

#pragma once

#include "gemm/tile_scheduler.cuh"

namespace weft {

struct ScatterTile {
    int step;
    int dst, index;  // of the tiles for one rank
    int batch, row, column;
    bool inside;
};

// Rows of tiles stand in a list, in chunks of `raster_group` rows of each rank: the first chunk for the peers, to each
// in turn; then alternately the next one for the peers and the local rows of the chunk before; at last the local rows
// of the last one. So data is in flight all the time, and what a local tile waits for left a raster group of steps
// before or earlier. A step is a pair of neighbours of the list. A peer's tile (row, column) for this rank comes no
// later in its order than the local one here: no circular wait, docs/protocol.md#matmul--reduce-scatter.
//
// With SPLIT_N ranks have columns of B of their own, of which both blocks of a cluster load the same: the list has
// pairs of rows for one rank, the last of which may lack its second row.
template <typename Params>
struct ScatterTileScheduler {
    static constexpr int ENTRY_ROWS = SPLIT_N ? 2 : 1;  // rows in an entry of the list

    int rows, columns;  // of tiles, for one rank; rows of one batch
    int own;  // entries of this rank, of all batches
    int chunk, last;  // entries of a chunk; which chunk is the last one

    __device__ explicit ScatterTileScheduler(const Params& p) {
        rows = (p.m + BM - 1) / BM;
        columns = (p.n + BN - 1) / BN;
        own = (p.batches * rows + ENTRY_ROWS - 1) / ENTRY_ROWS;
        chunk = min((p.raster_group + ENTRY_ROWS - 1) / ENTRY_ROWS, own);
        last = (own - 1) / chunk;
    }

    __device__ int each() const { return own * ENTRY_ROWS * columns; }  // tiles for one rank
    __device__ int pairs() const { return (own * ENTRY_ROWS * WORLD_SIZE + 1) / 2; }  // of rows of the list
    __device__ int steps() const { return pairs() * columns; }

    __device__ ScatterTile tile(const Params& p, int step, int block) const {
        ScatterTile t;
        t.step = step;
        int pair;
        grouped(step, pairs(), columns, p.raster_group, pair, t.column);
        const int place = (2 * pair + block) / ENTRY_ROWS, peers = WORLD_SIZE - 1;
        // Which chunk for the peers is current, or was the last one, and the entry after its begin.
        const int after = place - chunk * peers;
        const int c = after < 0 ? 0 : min(1 + after / (chunk * WORLD_SIZE), last);
        const int inside = after < 0 ? place : after - (c - 1) * chunk * WORLD_SIZE;
        const int of_peers = min(chunk, own - c * chunk) * peers;
        const bool mine = inside >= of_peers;
        const int entry = mine ? (c - 1) * chunk + inside - of_peers : c * chunk + inside / peers;
        const int row = entry * ENTRY_ROWS + block % ENTRY_ROWS;  // of tiles, of all batches
        t.dst = mine ? p.watch.rank : (p.watch.rank + 1 + inside % peers) % WORLD_SIZE;
        // A block without a tile loads for the other all the same, and rows past the end of A.
        t.inside = place < own * WORLD_SIZE && (!SPLIT_N || row < rows);
        t.index = row * columns + t.column;
        t.batch = row / rows;
        t.row = t.inside ? row % rows : rows;
        return t;
    }
};

}  // namespace weft
