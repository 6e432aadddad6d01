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

// Adds all peers' fragments, `slot` vectors apart, to a warpgroup's one of a local tile. False: a wait has expired. As
// many loads in flight as there are registers for: each trip keeps the tensor cores waiting for half a microsecond and
// more.
__device__ __forceinline__ bool add_parts(
    const ReceiveBuffer& receive_buffer, uint4* at, u32 slot, float scale, float (&sums)[ACC_REGS]) {
    constexpr int ALL = VECTORS, PEERS = WORLD_SIZE - 1;
    constexpr int FEWER = TENSOR_MEMORY ? 4 : 0;
    constexpr int ROOM = (ALL_REDUCE ? 8 : PEERS == 1 ? 16 : BIAS ? 9 : 12) - FEWER;
    constexpr int AHEAD = PEERS > ROOM ? 1 : ROOM / PEERS < ALL ? ROOM / PEERS : ALL;
    bool there = true;
#pragma unroll
    for (int first = 0; first < ALL; first += AHEAD) {
        uint4 parts[AHEAD * PEERS];
        const int count = first + AHEAD < ALL ? AHEAD : ALL - first;
        there &= take(receive_buffer, parts, count * PEERS, [&](int i) {
            return at + i % PEERS * u64{slot} + i / PEERS * GROUP;
        });
#pragma unroll
        for (int i = 0; i < count; ++i) add_up(parts + i * PEERS, scale, sums + PART_ELEMENTS * (first + i));
        at += AHEAD * GROUP;
    }
    return there;
}

// Bias and residual of a local tile, for `finish` of store_rows. The residual's rows come as the result's are stored, a
// vector a lane, and those of several sets at once: each alone would take a trip to memory. Past the end
// the last numbers are loaded, by whole warps (see `take`), and not stored.
template <typename Params>
struct Terms {
    static constexpr int ALL = ACC_REGS / 16, AT_ONCE = TENSOR_MEMORY ? 1 : 8;
    const Params& p;
    Place vectors, sums;  // of this lane's first ones
    const u16* residual;  // of the tile's part
    Vectors loaded[AT_ONCE];

    __device__ __forceinline__ Terms(const Params& p, const ScatterTile& t, int warpgroup)
        : p(p), vectors(place_of_vectors(warpgroup)), sums(place_of_sums(warpgroup)),
          residual(RESIDUAL ? p.residual + static_cast<u64>(t.batch) * p.m * p.n : nullptr) {
        vectors.row += t.row * BM;
        vectors.column += t.column * BN;
        sums.column += t.column * BN;
    }

    __device__ __forceinline__ void operator()(int i, float* values) {
        if constexpr (BIAS) add_bias(p.bias, sums.column + SET_COLUMNS * i, p.n, values);
        if constexpr (RESIDUAL) {
            if (i % AT_ONCE == 0) load(i);
            u32 words[8];
            words_of(loaded[i % AT_ONCE], words);
#pragma unroll
            for (int j = 0; j < 8; ++j) add_pair(words[j], values + 2 * j);
        }
    }

    __device__ __forceinline__ void load(int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i < ALL) {
                const int column = vectors.column + SET_COLUMNS * (first + i);
                loaded[i].first = load(vectors.row, column);
                loaded[i].second = load(vectors.row + VECTOR_ROWS, column + VECTOR_COLUMNS);
            }
        }
    }

    __device__ __forceinline__ uint4 load(int row, int column) const {
        const u16* at = residual + min(column, p.n - 8) + static_cast<u64>(min(row, p.m - 1)) * p.n;
        return load_vector(reinterpret_cast<const uint4*>(at));
    }
};

}  // namespace weft
