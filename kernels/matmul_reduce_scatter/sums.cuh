// The epilogue of a local tile: a thread adds the peers' partial results in rank order, a bias and a residual.

#pragma once

#include "gemm/gemm.cuh"
#include "comm/ll_protocol.cuh"
#include "tile_order.cuh"

namespace weft {

// own[8] = the sum of all ranks' in rank order, of which `own` is one, and `parts` are the others, an encoded vector of
// each.
__device__ __forceinline__ void add_up(const uint4* parts, float scale, float* own) {
    float total[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] = -0.f;  // x + -0 is x, of -0 too
#pragma unroll
    for (int i = 0; i < WORLD_SIZE; ++i) {
        if (i == RANK) {  // in front of slot RANK
#pragma unroll
            for (int e = 0; e < 8; ++e) total[e] += own[e];
        }
        if (i == WORLD_SIZE - 1) break;
        const uint4 part = ll_decode(parts[i]);
        const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float pair[2];
            Number::unpack(words[w], pair);
            total[2 * w] += pair[0];
            total[2 * w + 1] += pair[1];
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) own[e] = total[e] * scale;
}

// values += the two numbers at `at`.
__device__ __forceinline__ void add_pair(const u16* at, float* values) {
    float pair[2];
    Number::unpack(__ldg(reinterpret_cast<const u32*>(at)), pair);
    values[0] += pair[0];
    values[1] += pair[1];
}

// Adds bias and residual to this thread's vector `i` of a local tile. N is a multiple of 8, so a pair is inside or not.
template <typename Params>
__device__ __forceinline__ void add_terms(const Params& p, const ScatterTile& t, int warpgroup, int i, float* values) {
    const Place first = place_of_sums(warpgroup);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int column = t.column * BN + first.column + 16 * i + 8 * j;
        if (column >= p.n) break;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = t.row * BM + first.row + 8 * r;
            float* pair = values + 4 * j + 2 * r;
            if (BIAS) add_pair(p.bias + column, pair);
            if (RESIDUAL && row < p.m) {
                add_pair(p.residual + (static_cast<u64>(t.batch) * p.m + row) * p.n + column, pair);
            }
        }
    }
}

}  // namespace weft
