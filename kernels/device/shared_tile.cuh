// A tile whose K several clusters share, each a part of it: all but the first leave their sums in memory of this GPU, and
// the first adds them to its own, in the order of their parts.
//
// Who writes: a multiplying warp of another part than the first, SUMS numbers of each lane, and behind them its flag.
// Who waits: the warp of the same number in the first part's block. Both run at once: the launch is resident.

#pragma once

#include "gemm.cuh"

namespace weft {

constexpr int SHARING_WARPS = 8;  // of a block, each with a flag of its own
constexpr int TILE_SUMS = 2 * GROUP * SUMS;  // of all of them

// Which of the tiles' parts: `part` from 1 on, of `parts`.
__device__ __forceinline__ u32 shared_place(int tile, int part, int parts) { return tile * (parts - 1) + part - 1; }

__device__ __forceinline__ uint4* shared_sums(void* base, u32 place) {
    return static_cast<uint4*>(base) + place * u64{TILE_SUMS / 4} + threadIdx.x / GROUP * (TILE_SUMS / 8) +
        threadIdx.x % GROUP;
}

__device__ __forceinline__ u32 shared_flag(u32 first, u32 place) {
    return first + place * SHARING_WARPS + threadIdx.x / 32;
}

__device__ __forceinline__ void leave_sums(uint4* to, u32* flag, u32 use, const float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) {
        const float* v = sums + 4 * i;
        const uint4 bits = make_uint4(
            __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
        to[i * GROUP] = bits;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        post_behind_fence(flag, use);
    }
    __syncwarp();
}

__device__ __forceinline__ void add_sums(
    const Watch& watch, const uint4* from, u32 flag, u32 use, float (&sums)[SUMS]) {
    constexpr int ALL = SUMS / 4, AHEAD = 8;  // vectors of a lane, and how many are on their way at once
    if (threadIdx.x % 32 == 0) wait_flag(watch, watch.rank, flag, use, WAIT_DATA);
#pragma unroll
    for (int first = 0; first < ALL; first += AHEAD) {
        uint4 v[AHEAD];
        __syncwarp();  // the first lane has waited; and the compiler shall not load all at once, and spill
#pragma unroll
        for (int i = 0; i < AHEAD && first + i < ALL; ++i) v[i] = load_payload(from + (first + i) * GROUP);
#pragma unroll
        for (int i = 0; i < AHEAD && first + i < ALL; ++i) {
            const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[4 * (first + i) + e] += __uint_as_float(words[e]);
        }
    }
}

}  // namespace weft
