// The tiles of a grouped product, found on the device. Plain arithmetic and one warp's votes.

#pragma once

#include "gemm/tile_scheduler.cuh"

namespace weft {

// Rows of a tile, up to `end`, and its columns: of one expert. `wide`: the other block of the cluster has the same rows.
struct GroupTile {
    int expert, row, end, column;
    bool wide;
};

// The order of tiles. A step is two tiles of an expert, for the two blocks of a cluster: one below the other, or side by
// side where the expert's last rows fill no more than one. All steps of an expert come before those of the next one, and
// those of the same columns together, so its weights are read from memory once.
//
// Whatever `offs` says, a tile's rows lie from 0 to `p.total`.
template <typename Params>
struct GroupScheduler {
    const Params& p;
    const int* ends;  // in shared memory: steps up to the end of each expert
    int first = 0;  // experts before it have no more steps

    __device__ __forceinline__ GroupScheduler(const Params& p, const int* ends) : p(p), ends(ends) {}

    __device__ __forceinline__ static int begin_of(const Params& p, int expert) {
        return expert == 0 ? 0 : min(max(p.offs[expert - 1], 0), p.total);
    }
    __device__ __forceinline__ static int end_of(const Params& p, int expert) { return min(p.offs[expert], p.total); }
    __device__ __forceinline__ static int rows_of(const Params& p, int expert) {
        return max(end_of(p, expert) - begin_of(p, expert), 0);
    }
    // How many pairs of tiles lie below each other, and whether some of the rows are left for wide steps.
    __device__ __forceinline__ static int pairs_of(int rows) { return (rows + BM - 1) / (2 * BM); }
    __device__ __forceinline__ static bool ends_wide(int rows) { return rows > pairs_of(rows) * 2 * BM; }

    // Before there is a scheduler, by all threads: how many steps experts have.
    __device__ __forceinline__ static void count(const Params& p, int* ends) {
        for (int e = threadIdx.x; e < p.experts; e += THREADS) {
            const int rows = rows_of(p, e);
            ends[e] = pairs_of(rows) * p.columns + (ends_wide(rows) ? (p.columns + 1) / 2 : 0);
        }
    }

    // By a whole warp, after all have counted.
    __device__ __forceinline__ static void add_up(const Params& p, int* ends) {
        const int lane = threadIdx.x % 32;
        int before = 0;
        for (int first = 0; first < p.experts; first += 32) {
            const int e = first + lane;
            int up_to = e < p.experts ? ends[e] : 0;
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_sync(~0u, up_to, (lane - step) & 31);
                if (lane >= step) up_to += lower;
            }
            up_to += before;
            if (e < p.experts) ends[e] = up_to;
            before = __shfl_sync(~0u, up_to, 31);
        }
    }

    __device__ __forceinline__ int steps() const { return ends[p.experts - 1]; }

    // By a whole warp. Steps do not go back.
    __device__ __forceinline__ GroupTile tile(int step, int block) {
        const int lane = threadIdx.x % 32;
        u32 later;
        while (true) {
            later = __ballot_sync(~0u, first + lane < p.experts && ends[first + lane] > step);
            if (later != 0) break;
            first += 32;
        }
        const int expert = first + __ffs(later) - 1;
        const int inside = step - (expert == 0 ? 0 : ends[expert - 1]);
        const int rows = rows_of(p, expert), pairs = pairs_of(rows);
        // Wide steps are among those of the last raster group, each after the pairs of its two columns.
        const int before = max(pairs - 1, 0) / p.raster_group * p.raster_group, inside_last = inside - before * p.columns;
        int pair, column;
        bool wide = false;
        if (inside_last < 0 || !ends_wide(rows)) {
            grouped(inside, pairs, p.columns, p.raster_group, pair, column);
        } else {
            const int height = pairs - before, two = inside_last / (2 * height + 1);
            const int place = inside_last - two * (2 * height + 1);
            wide = place == height * min(2, p.columns - 2 * two);
            pair = wide ? pairs : before + place % height;
            column = 2 * two + (wide ? block : place / height);
        }
        const int row = begin_of(p, expert) + (2 * pair + (wide ? 0 : block)) * BM;
        return {expert, row, end_of(p, expert), column, wide};
    }
};

}  // namespace weft
