// The tiles of a grouped product, found on the device. Plain arithmetic and one warp's votes.

#pragma once

#include "gemm/tile_scheduler.cuh"

namespace weft {

// Rows of a tile, up to `end`, and its columns of B `b`: of one expert. `wide`: the other block of the cluster has the
// same rows.
struct GroupTile {
    int expert, row, end, b, column;
    bool wide;
};

// The order of tiles. A group is the rows of an expert. A step is two of its tiles, for the two blocks of a cluster: one below
// the other, or side by side where the last rows fill no more than one. Columns of several B stand in a list. All steps
// of an expert come before those of the next one, and those of the same columns together, so its weights are read from
// memory once.
//
// Whatever `ends` say, a tile's rows lie from 0 to `p.total`.
template <typename Params>
struct GroupScheduler {
    const Params& p;
    const int* steps_up_to;  // in shared memory: the end of each group
    int first = 0;  // groups before it have no more steps

    __device__ __forceinline__ GroupScheduler(const Params& p, const int* steps_up_to) : p(p), steps_up_to(steps_up_to) {}

    __device__ __forceinline__ static int begin_of(const Params& p, int group) {
        return group == 0 ? 0 : min(max(p.ends[group - 1], 0), p.total);
    }
    __device__ __forceinline__ static int end_of(const Params& p, int group) { return min(p.ends[group], p.total); }
    __device__ __forceinline__ static int rows_of(const Params& p, int group) {
        return max(end_of(p, group) - begin_of(p, group), 0);
    }
    // How many pairs of tiles lie below each other, and whether some of the rows are left for wide steps.
    __device__ __forceinline__ static int pairs_of(int rows) { return (rows + BM - 1) / (2 * BM); }
    __device__ __forceinline__ static bool ends_wide(int rows) { return rows > pairs_of(rows) * 2 * BM; }

    // Before there is a scheduler, by all threads: how many steps groups have.
    __device__ __forceinline__ static void count(const Params& p, int* steps_up_to) {
        for (int g = threadIdx.x; g < p.groups; g += THREADS) {
            const int rows = rows_of(p, g);
            steps_up_to[g] = pairs_of(rows) * p.all_columns + (ends_wide(rows) ? (p.all_columns + 1) / 2 : 0);
        }
    }

    // By a whole warp, after all have counted.
    __device__ __forceinline__ static void add_up(const Params& p, int* steps_up_to) {
        const int lane = threadIdx.x % 32;
        int before = 0;
        for (int first = 0; first < p.groups; first += 32) {
            const int g = first + lane;
            int up_to = g < p.groups ? steps_up_to[g] : 0;
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_sync(~0u, up_to, (lane - step) & 31);
                if (lane >= step) up_to += lower;
            }
            up_to += before;
            if (g < p.groups) steps_up_to[g] = up_to;
            before = __shfl_sync(~0u, up_to, 31);
        }
    }

    __device__ __forceinline__ int steps() const { return steps_up_to[p.groups - 1]; }

    // By a whole warp. Steps do not go back.
    __device__ __forceinline__ GroupTile tile(int step, int block) {
        const int lane = threadIdx.x % 32;
        u32 later;
        while (true) {
            later = __ballot_sync(~0u, first + lane < p.groups && steps_up_to[first + lane] > step);
            if (later != 0) break;
            first += 32;
        }
        const int group = first + __ffs(later) - 1;
        const int inside = step - (group == 0 ? 0 : steps_up_to[group - 1]);
        const int rows = rows_of(p, group), pairs = pairs_of(rows);
        // Wide steps are among those of the last raster group, each after the pairs of its two columns.
        const int before = max(pairs - 1, 0) / p.raster_group * p.raster_group;
        const int inside_last = inside - before * p.all_columns;
        int pair, column;
        bool wide = false;
        if (inside_last < 0 || !ends_wide(rows)) {
            grouped(inside, pairs, p.all_columns, p.raster_group, pair, column);
        } else {
            const int height = pairs - before, two = inside_last / (2 * height + 1);
            const int place = inside_last - two * (2 * height + 1);
            wide = place == height * min(2, p.all_columns - 2 * two);
            pair = wide ? pairs : before + place % height;
            column = 2 * two + (wide ? block : place / height);
        }
        const int row = begin_of(p, group) + (2 * pair + (wide ? 0 : block)) * BM;
        int b = 0;
        while (b + 1 < p.bs && column >= p.columns[b]) column -= p.columns[b++];
        return {group, row, end_of(p, group), b, column, wide};
    }
};

}  // namespace weft
