// The tiles of a grouped product, found on the device. Plain arithmetic and one warp's votes.

#pragma once

#include "gemm/tile_scheduler.cuh"

namespace weft {

// Rows of a tile, up to `end`, and its columns: of one expert.
struct GroupTile {
    int expert, row, end, column;
};

// The order of tiles. A step is a pair of tiles, one below the other, for the two blocks of a cluster. All steps of an
// expert come before those of the next one, so its weights are read from memory once.
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
    __device__ __forceinline__ static int pairs_of(const Params& p, int expert) {
        return (max(end_of(p, expert) - begin_of(p, expert), 0) + 2 * BM - 1) / (2 * BM);
    }

    // Before there is a scheduler, by all threads: how many steps experts have.
    __device__ __forceinline__ static void count(const Params& p, int* ends) {
        for (int e = threadIdx.x; e < p.experts; e += THREADS) ends[e] = pairs_of(p, e) * p.columns;
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
        int pair, column;
        grouped(inside, pairs_of(p, expert), p.columns, p.raster_group, pair, column);
        return {expert, begin_of(p, expert) + (2 * pair + block) * BM, end_of(p, expert), column};
    }
};

}  // namespace weft
