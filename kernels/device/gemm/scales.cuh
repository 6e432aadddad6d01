// What fp8 operands add to gemm.cuh: their scales, a bias, and sums that are promoted.
//
// To gemm.cuh two fp8 numbers side by side are one of 16 bits: tensor maps, stages and strides of K are those of half
// as many numbers, and a stage is 128 of them deep. Both operands have K contiguous.
//
// The tensor cores keep fewer bits of a sum than float32 has. With PROMOTE what a stage adds is added to the sums in
// float32, as cuBLAS does. With block-wise scales it is multiplied by its blocks' on the way.
//
// Defined by the includer: FP8_TYPES (of A and B, as PTX calls them), SCALES (1: one of each operand, 2: one for each
// row of A and column of B, 3: for blocks of 1 x 128 and 128 x 128) and PROMOTE.

#pragma once

#include "gemm/gemm.cuh"

namespace weft {

constexpr int TENSOR_WISE = 1, ROW_WISE = 2, BLOCK_WISE = 3;

static_assert(!B_ROWS, "K is contiguous in B");
static_assert(SCALES != BLOCK_WISE || (PROMOTE && WN <= 128 && 128 % WN == 0), "a warpgroup's columns lie in one block");

// Of a product.
struct Scales {
    const float* b;  // one; [N]; or of block 0 of both
    const u16* bias;  // [N], of the result's dtype, or null
    int b_block, b_column;  // block-wise: from a block of K to the next, and from one of N
};

// Of a tile. Those of A are loaded past the L1 cache: they may have been written by a peer.
struct TileScales {
    const Scales& of;
    const float* a;  // one; [rows]; or [blocks of K][rows]
    int a_block;  // from a block of K to the next
    int row, rows;  // of the tile's first one, and of `a`
    int column, columns;  // of B: of the tile's first one, and all

    __device__ __forceinline__ const float* of_row(int below) const { return a + max(min(row + below, rows - 1), 0); }
};

// The scales of the blocks of a stage, for the rows and columns of a thread. The next stage's are loaded one ahead.
struct BlockScales {
    const float *upper, *lower, *b;
    int a_block, b_block;

    __device__ __forceinline__ BlockScales(const TileScales& t, int warpgroup) {
        const int first = place_of_sums(warpgroup).row, block = (t.column + warpgroup / WARPGROUPS_M * WN) / 128;
        upper = t.of_row(first);
        lower = t.of_row(first + 8);
        b = t.of.b + min(block, (t.columns - 1) / 128) * t.of.b_column;
        a_block = t.a_block;
        b_block = t.of.b_block;
    }

    __device__ __forceinline__ float3 at(int i) const {
        return make_float3(__ldcg(upper + i * a_block), __ldcg(lower + i * a_block), __ldg(b + i * b_block));
    }
};

// `multiply` of gemm.cuh with sums that are promoted behind each stage.
template <typename Beside>
__device__ __forceinline__ void multiply_promoting(
    const Shared& s, PipelineState<STAGES>& state, int warpgroup, int depth, float (&sums)[SUMS], const TileScales& t,
    const Beside& beside) {
    const int m = warpgroup % WARPGROUPS_M, n = warpgroup / WARPGROUPS_M;
    const bool first_lane = threadIdx.x % 32 == 0;
    const BlockScales scales(t, warpgroup);
    float3 factors, next;
#pragma unroll
    for (int e = 0; e < SUMS; ++e) sums[e] = 0;
    for (int i = 0; i < depth; ++i) {
        u8* stage = s.stages + state.at * STAGE_BYTES;
        const u64 a = smem_descriptor(stage + m * 64 * 128, 0, 1024);
        const u64 b = smem_descriptor(stage + A_BYTES + n * WN * 128, 0, 1024);
        float parts[SUMS];
        wait(s.full + state.at, state.parity);
        beside.begin(i, stage + m * 64 * 128);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) product<WN>(parts, a + k * 2, b + k * 2, k);
        warpgroup_commit_batch();
        if constexpr (SCALES == BLOCK_WISE) {
            // Those of a peer's rows are there when the first stage is.
            factors = i == 0 ? scales.at(0) : next;
            if (i + 1 < depth) next = scales.at(i + 1);
        }
        warpgroup_wait<0>();
        beside.end();
        if (first_lane) release(s.empty + state.at);
        state.next();
        if constexpr (SCALES == BLOCK_WISE) {
            const float upper = factors.x * factors.z, lower = factors.y * factors.z;
#pragma unroll
            for (int e = 0; e < SUMS; ++e) sums[e] = fmaf(parts[e], e & 2 ? lower : upper, sums[e]);
        } else {
#pragma unroll
            for (int e = 0; e < SUMS; ++e) sums[e] += parts[e];
        }
    }
}

// sums = sums * their scales + bias.
__device__ __forceinline__ void scale_sums(const TileScales& t, int warpgroup, float (&sums)[SUMS]) {
    const Place first = place_of_sums(warpgroup);
    float upper = 1, lower = 1;
    if constexpr (SCALES == TENSOR_WISE) upper = lower = __ldcg(t.a) * __ldg(t.of.b);
    if constexpr (SCALES == ROW_WISE) {
        upper = __ldcg(t.of_row(first.row));
        lower = __ldcg(t.of_row(first.row + 8));
    }
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
        const int column = t.column + first.column + 8 * j;  // an even one of a multiple of 16
        const bool inside = column < t.columns;
        float* v = sums + 4 * j;
        if constexpr (SCALES != BLOCK_WISE) {
            v[0] *= upper;
            v[1] *= upper;
            v[2] *= lower;
            v[3] *= lower;
        }
        if (SCALES == ROW_WISE && inside) {
            const float2 b = __ldg(reinterpret_cast<const float2*>(t.of.b + column));
            v[0] *= b.x;
            v[1] *= b.y;
            v[2] *= b.x;
            v[3] *= b.y;
        }
        if (t.of.bias != nullptr && inside) {
            float pair[2];
            Number::unpack(__ldg(reinterpret_cast<const u32*>(t.of.bias + column)), pair);
            v[0] += pair[0];
            v[1] += pair[1];
            v[2] += pair[0];
            v[3] += pair[1];
        }
    }
}

// A tile's product, scaled and with its bias.
template <typename Beside = NothingBeside>
__device__ __forceinline__ void multiply_scaled(
    const Shared& s, PipelineState<STAGES>& state, int warpgroup, int depth, float (&sums)[SUMS], const TileScales& t,
    const Beside& beside = {}) {
    if constexpr (PROMOTE) {
        multiply_promoting(s, state, warpgroup, depth, sums, t, beside);
    } else {
        multiply(s, state, warpgroup, depth, sums, beside);
    }
    scale_sums(t, warpgroup, sums);
}

}  // namespace weft
