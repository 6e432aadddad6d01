// What fp8 operands add to the main loop of Hopper: their scales, a bias, and sums that are promoted.
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

// The scales of the blocks of a stage, for the rows and columns of a thread.
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

    // Of two stages; after the last one, of that.
    __device__ __forceinline__ void load(float3 (&factors)[2], int i, int depth) const {
        factors[0] = at(min(i, depth - 1));
        factors[1] = at(min(i + 1, depth - 1));
    }
};

// `multiply` of main_loop.cuh with sums that are promoted after each stage. Block-wise scales are loaded for two stages at
// once, two or three ahead, alternately into two sets of registers: where they moved from one to the other, tensor
// instructions would wait for the loads.
template <typename MainloopHook>
__device__ __forceinline__ void multiply_promoting(
    const Shared& s, MultiplyState& state, int warpgroup, int depth, float (&sums)[ACC_REGS],
    const TileScales& t, const MainloopHook& hook) {
    constexpr int UNROLLED = SCALES == BLOCK_WISE ? 4 : 1;
    const int m = warpgroup % WARPGROUPS_M, n = warpgroup / WARPGROUPS_M;
    const bool first_lane = threadIdx.x % 32 == 0;
    const BlockScales scales(t, warpgroup);
    float3 factors[2][2];
#pragma unroll
    for (int e = 0; e < ACC_REGS; ++e) sums[e] = 0;
#pragma unroll 1
    for (int first = 0; first < depth; first += UNROLLED) {
#pragma unroll
        for (int turn = 0; turn < UNROLLED; ++turn) {
            const int i = first + turn, set = turn / 2;
            if (i >= depth) break;
            u8* stage = s.stages + state.at * STAGE_BYTES;
            const u64 a = smem_descriptor(stage + m * 64 * 128, 0, 1024);
            const u64 b = smem_descriptor(stage + A_BYTES + n * WN * 128, 0, 1024);
            float parts[ACC_REGS];
            wait(s.full + state.at, state.parity);
            hook.begin(i, stage + m * 64 * 128);
            warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < BK / 16; ++k) product<WN>(parts, a + k * 2, b + k * 2, k);
            warpgroup_commit_batch();
            if constexpr (SCALES == BLOCK_WISE) {
                // Those of a peer's rows are there when the first stage is.
                if (i == 0) scales.load(factors[0], 0, depth);
                if (turn % 2 == 0) scales.load(factors[1 - set], i + 2, depth);
            }
            warpgroup_wait<0>();
            hook.end();
            if (first_lane) release(s.empty + state.at);
            state.next();
            if constexpr (SCALES == BLOCK_WISE) {
                const float3 of_stage = factors[set][turn % 2];
                const float upper = of_stage.x * of_stage.z, lower = of_stage.y * of_stage.z;
#pragma unroll
                for (int e = 0; e < ACC_REGS; ++e) sums[e] = fmaf(parts[e], e & 2 ? lower : upper, sums[e]);
            } else {
#pragma unroll
                for (int e = 0; e < ACC_REGS; ++e) sums[e] += parts[e];
            }
        }
    }
}

// The scales of a tile that is not scaled by blocks. A thread loads them when the tile's first stage is there, and needs
// them after its last one. Each lane holds two columns of every 64 of its warpgroup, for the whole warp.
struct SumScales {
    static constexpr int GROUPS = SCALES == ROW_WISE ? (WN + 63) / 64 : 1;
    float upper, lower;
    float2 columns[GROUPS];

    __device__ __forceinline__ SumScales(const TileScales& t, int warpgroup) {
        if constexpr (SCALES == ROW_WISE) {
            const int first = place_of_sums(warpgroup).row;
            upper = __ldcg(t.of_row(first));
            lower = __ldcg(t.of_row(first + 8));
            const int column = t.column + warpgroup / WARPGROUPS_M * WN + threadIdx.x % 32 * 2;
            const int last = t.columns - 2;  // columns past the end have those of the last; there are a multiple of 16
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                columns[i] = __ldg(reinterpret_cast<const float2*>(t.of.b + min(column + 64 * i, last)));
            }
        } else {
            upper = __ldcg(t.a);
            lower = __ldg(t.of.b);
        }
    }

    __device__ __forceinline__ void scale(float (&sums)[ACC_REGS]) const {
        if constexpr (SCALES == ROW_WISE) {
#pragma unroll
            for (int j = 0; j < WN / 8; ++j) {
                const int lane = j % 8 * 4 + threadIdx.x % 4;
                const float left = __shfl_sync(~0u, columns[j / 8].x, lane);
                const float right = __shfl_sync(~0u, columns[j / 8].y, lane);
                float* v = sums + 4 * j;
                v[0] = v[0] * left * upper;
                v[1] = v[1] * right * upper;
                v[2] = v[2] * left * lower;
                v[3] = v[3] * right * lower;
            }
        } else {
            const float both = upper * lower;
#pragma unroll
            for (int e = 0; e < ACC_REGS; ++e) sums[e] *= both;
        }
    }
};

// Adds the bias. Several loads are in flight at once; columns past the end have that of the last.
__device__ __forceinline__ void add_bias(const TileScales& t, int warpgroup, float (&sums)[ACC_REGS]) {
    constexpr int ALL = WN / 8, AT_ONCE = ALL < 8 ? ALL : 8;
    const int column = t.column + place_of_sums(warpgroup).column, last = t.columns - 2;
    if (t.of.bias == nullptr) return;
#pragma unroll
    for (int j = 0; j < ALL; j += AT_ONCE) {
        u32 words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (j + i < ALL) {
                words[i] = __ldg(reinterpret_cast<const u32*>(t.of.bias + min(column + 8 * (j + i), last)));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (j + i < ALL) {
                add_pair(words[i], sums + 4 * (j + i));
                add_pair(words[i], sums + 4 * (j + i) + 2);
            }
        }
    }
}

// A tile's product, scaled and with its bias.
template <typename MainloopHook = NoMainloopHook>
__device__ __forceinline__ void multiply_scaled(
    const Shared& s, MultiplyState& state, int warpgroup, int depth, float (&sums)[ACC_REGS],
    const TileScales& t, const MainloopHook& hook = {}) {
    if constexpr (SCALES == BLOCK_WISE) {
        multiply_promoting(s, state, warpgroup, depth, sums, t, hook);
    } else {
        wait(s.full + state.at, state.parity);  // those of a peer's rows are there, too
        const SumScales scales(t, warpgroup);
        if constexpr (PROMOTE) {
            multiply_promoting(s, state, warpgroup, depth, sums, t, hook);
        } else {
            multiply(s, state, warpgroup, depth, sums, hook);
        }
        scales.scale(sums);
    }
    add_bias(t, warpgroup, sums);
}

}  // namespace weft
