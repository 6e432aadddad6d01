// The epilogue of a local tile: a thread adds the peers' partial results in rank order, a bias and a residual.

#pragma once

#include "gemm/gemm.cuh"
#include "parts.cuh"
#include "tile_order.cuh"

namespace weft {

// own[PART_ELEMENTS] = the sum of all ranks' in rank order, of which `own` is one, and `parts` are the others, an
// encoded vector of each.
__device__ __forceinline__ void add_up(const uint4* parts, float scale, float* own) {
    float total[PART_ELEMENTS];
#pragma unroll
    for (int e = 0; e < PART_ELEMENTS; ++e) total[e] = -0.f;  // x + -0 is x, of -0 too
#pragma unroll
    for (int i = 0; i < WORLD_SIZE; ++i) {
        if (i == RANK) {  // before slot RANK
#pragma unroll
            for (int e = 0; e < PART_ELEMENTS; ++e) total[e] += own[e];
        }
        if (i == WORLD_SIZE - 1) break;
        const uint4 part = ll_decode(parts[i]);
        const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float numbers[PartNumber::PER_WORD];
            PartNumber::unpack(words[w], numbers);
#pragma unroll
            for (int e = 0; e < PartNumber::PER_WORD; ++e) total[w * PartNumber::PER_WORD + e] += numbers[e];
        }
    }
#pragma unroll
    for (int e = 0; e < PART_ELEMENTS; ++e) own[e] = total[e] * scale;
}

// values[0] and [1] += the two numbers of a word.
__device__ __forceinline__ void add_pair(u32 word, float* values) {
    float pair[2];
    Number::unpack(word, pair);
    values[0] += pair[0];
    values[1] += pair[1];
}

// Bias and residual of a local tile, for `finish` of store_rows. The residual's rows come as the result's are stored, a
// vector a lane, and those of several groups of 32 columns at once: each alone would take a trip to memory. Past the end
// the last numbers are loaded, by whole warps (see `take`), and not stored.
template <typename Params>
struct Terms {
    static constexpr int ALL = WN / 32, AT_ONCE = 8;
    const Params& p;
    int row, column;  // of this lane's first vector
    const u16* residual;  // of the tile's part
    uint4 upper[AT_ONCE], lower[AT_ONCE];

    __device__ __forceinline__ Terms(const Params& p, const ScatterTile& t, int warpgroup)
        : p(p), row(t.row * BM + place_of_sums(warpgroup).row),
          column(t.column * BN + warpgroup / WARPGROUPS_M * WN + threadIdx.x % 4 * 8),
          residual(RESIDUAL ? p.residual + static_cast<u64>(t.batch) * p.m * p.n : nullptr) {}

    __device__ __forceinline__ void operator()(int i, float* values) {
        if constexpr (BIAS) {
            const int first = column - threadIdx.x % 4 * 6 + 32 * i;  // of this lane's first pair
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 word = __ldg(reinterpret_cast<const u32*>(p.bias + min(first + 8 * j, p.n - 2)));
                add_pair(word, values + 4 * j);
                add_pair(word, values + 4 * j + 2);
            }
        }
        if constexpr (RESIDUAL) {
            if (i % AT_ONCE == 0) load(i);
            const uint4 up = upper[i % AT_ONCE], low = lower[i % AT_ONCE];
            // To where sums lie: the exchange is its own inverse.
            const uint4 above = transposed(up.x, up.y, up.z, up.w), below = transposed(low.x, low.y, low.z, low.w);
            const u32 words[8] = {above.x, below.x, above.y, below.y, above.z, below.z, above.w, below.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) add_pair(words[j], values + 2 * j);
        }
    }

    __device__ __forceinline__ void load(int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i < ALL) {
                const u16* at = residual + min(column + 32 * (first + i), p.n - 8);
                upper[i] = load_vector(reinterpret_cast<const uint4*>(at + static_cast<u64>(min(row, p.m - 1)) * p.n));
                lower[i] =
                    load_vector(reinterpret_cast<const uint4*>(at + static_cast<u64>(min(row + 8, p.m - 1)) * p.n));
            }
        }
    }
};

}  // namespace weft
