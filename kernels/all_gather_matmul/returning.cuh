// The gathered A, stored by whoever has loaded it: what the main loop does besides, with RETURN_A.

#pragma once

#include "gemm/gemm.cuh"
#include "tile_order.cuh"

namespace weft {

// What the main loop does with 64 rows of A of a tile: one thread stores them as they lie in shared memory, and lets go
// of a stage when they have been read there. The tiles of a row, one for each column of tiles of the first B, take turns
// by stages, so that none of them takes much longer than the others.
template <typename Params>
struct Returning {
    const Params& p;
    const GatherTile& t;
    int warpgroup, depth;
    bool mine;
    mutable int next;  // stage to store
    mutable bool storing = false;

    __device__ __forceinline__ Returning(const Params& p, const GatherTile& t, int warp)
        : p(p), t(t), warpgroup(warp / 4), depth((p.k + BK - 1) / BK),
          // With BM = 64 both warpgroups have the same rows.
          mine(t.b == 0 && warp % 4 == 0 && warpgroup < BM / 64), next(t.column) {}

    __device__ __forceinline__ void begin(int i, const u8* rows) const {
        storing = mine && i == next;
        if (!storing) return;
        next += p.columns[0];
        if (!elected()) return;
        const int src = SPLIT_K ? i / depth : t.src, k = SPLIT_K ? i % depth : i;
        tma_store(p.returned, rows, k * BK, t.row * BM + warpgroup * 64, src, 0);
    }

    __device__ __forceinline__ void end() const {
        if (!storing) return;
        if (elected()) tma_stores_have_read();
        __syncwarp();
    }
};

}  // namespace weft
