// Exponentials of x @ weight.t() in place of logits: out[v, m] = exp(score[m, v] - base[m]), where a score is a logit
// by the temperature, of x [m, K] and weight [n, K] in bfloat16. With them each row's sum of a tile's columns, and the
// score of its target, in float32, as accumulators are.
//
// Where a row's exponentials would overflow, its base is raised by `excess`, which a first launch finds. A second one,
// `again`, computes those pairs of tiles once more, or ends at once where there are none.
//
// A tile has rows of x as rows, so that a row's sum is one of registers; it is transposed on its way through shared
// memory. It waits for no other rank, and is graph-safe. For Hopper.

#define SERVE_REGISTERS 72
#include "gemm/gemm.cuh"
#include "ptx/transpose.cuh"

using weft::u16;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int SET_BYTES = 32 * 32;  // a warp's 16 rows of a set's 32 columns
constexpr int BUFFER_BYTES = 2 * SET_BYTES;  // of a warp
constexpr float MOST = 1.15e18f;  // of a row's sum in a tile: 2^60
constexpr float LOG2E = 1.4426950408889634f;

struct Params {
    weft::TensorMap a;  // x [1, 1, m, K], boxes of a stage
    weft::TensorMap b;  // weight.t() [K, n]
    const long long* targets;  // [m]
    const long long* start;  // the first column of the weight
    const float* base;  // [m]
    float* sums;  // [columns, m]
    float* scores;  // [m]: of targets, where they are here
    float* excess;  // [m], times log2(e); 0 at first. Compared by its bits, as none is below 0
    u32* exceeded;  // [1], 0 at first: whether any row's is above 0
    u16* out;  // [n, stride]
    int m, n, k, stride;
    int pairs, columns;  // of tiles
    int raster_group;
    int again;
    float scale;  // log2(e) / temperature
    int reserved[7];
};

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

struct At {
    int row, column;  // of a tile
};

// Calls `each` for the tiles of this block.
template <typename Each>
__device__ __forceinline__ void each_tile(const Params& p, const weft::Shared& s, const Each& each) {
    for (int step = blockIdx.x / weft::CLUSTER; step < p.pairs * p.columns; step += gridDim.x / weft::CLUSTER) {
        int pair, column;
        weft::grouped(step, p.pairs, p.columns, p.raster_group, pair, column);
        if (p.again) {
            bool any = false;
            for (int row = pair * 2 * BM + threadIdx.x % 32; row < min((pair + 1) * 2 * BM, p.m); row += 32) {
                any |= __ldg(p.excess + row) > 0;
            }
            if (!__any_sync(~0u, any)) continue;
        }
        each(At{(2 * pair + s.block) * BM, column * BN});
    }
}

// By a warp: 16 rows of a set of 32 columns, transposed. Each lane has words of two columns, in rows lane / 4 and 8 on.
__device__ __forceinline__ void store_set(
    u8* buffer, const u32 (&words)[8], u16* to, u64 stride, int rows, int columns) {
    const int lane = threadIdx.x % 32;
    const auto place = [](int column, int half) { return column * 32 + (half ^ (column / 4 & 1)) * 16; };
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        u8* at = buffer + place(8 * (j + lane / 16) + lane % 8, lane / 8 % 2);
        weft::store_transposed(at, words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3]);
    }
    __syncwarp();
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
        const int column = lane / 2 + 16 * turn, half = lane % 2;
        const uint4 v = *reinterpret_cast<const uint4*>(buffer + place(column, half));
        if (column < columns && 8 * half < rows) *reinterpret_cast<uint4*>(to + column * stride + 8 * half) = v;
    }
}

// What a thread has of a tile: two rows.
__device__ __forceinline__ void finish(
    const Params& p, const At& t, int warpgroup, u8* buffer, float (&sums)[weft::ACC_REGS]) {
    const weft::Place at = weft::place_of_sums(warpgroup);
    const int first = t.row + at.row, mine = t.column + at.column, warp_row = first - threadIdx.x % 32 / 4;
    float base[2], total[2] = {};
    int target[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = min(first + 8 * r, p.m - 1);
        base[r] = LOG2E * __ldg(p.base + row) + (p.again ? __ldg(p.excess + row) : 0.0f);
        const long long from_here = __ldg(p.targets + row) - __ldg(p.start) - mine;
        target[r] = from_here >= 0 && from_here < BN && mine + from_here < p.n ? static_cast<int>(from_here) : -1;
    }
    if (t.column + BN > p.n) {
#pragma unroll
        for (int e = 0; e < weft::ACC_REGS; ++e) {
            if (mine + e / 4 * 8 + e % 2 >= p.n) sums[e] = -__int_as_float(0x7f800000);
        }
    }
    u16* out = p.out + static_cast<u64>(t.column) * p.stride + warp_row;
#pragma unroll
    for (int i = 0; i < weft::ACC_REGS / 16; ++i) {
        u32 words[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float* pair = sums + 16 * i + 2 * j;
            const float b = base[j % 2];
            const float e[2] = {
                weft::exp2_of(fmaf(pair[0], p.scale, -b)), weft::exp2_of(fmaf(pair[1], p.scale, -b))};
            total[j % 2] += e[0] + e[1];
            words[j] = weft::Number::pack(e);
        }
        store_set(
            buffer + i % 2 * SET_BYTES, words, out + static_cast<u64>(32 * i) * p.stride, p.stride, p.m - warp_row,
            p.n - t.column - 32 * i);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first + 8 * r;
        total[r] = quad_sum(total[r]);
        if (threadIdx.x % 4 == 0 && row < p.m) {
            p.sums[static_cast<u64>(t.column / BN) * p.m + row] = total[r];
        }
        if (target[r] >= 0 && target[r] % 8 < 2) {
            float score = 0;
#pragma unroll
            for (int e = 0; e < weft::ACC_REGS / 2; ++e) {
                if (target[r] == e / 2 * 8 + e % 2) score = sums[e / 2 * 4 + 2 * r + e % 2];
            }
            if (row < p.m) p.scores[row] = score * p.scale / LOG2E;
        }
        if (__any_sync(~0u, total[r] > MOST) && !p.again) {
            float top = -__int_as_float(0x7f800000);
#pragma unroll
            for (int e = 0; e < weft::ACC_REGS / 2; ++e) top = fmaxf(top, sums[e / 2 * 4 + 2 * r + e % 2]);
            top = fmaf(quad_max(top), p.scale, -base[r]);
            if (total[r] > MOST && threadIdx.x % 4 == 0 && row < p.m) {
                atomicMax(reinterpret_cast<int*>(p.excess + row), __float_as_int(top));
                *p.exceeded = 1;
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    exponentials(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    if (p.again && __ldg(p.exceeded) == 0) return;
    const weft::Shared s = weft::shared_memory(base);
    const int warp = weft::warp_of_block(), warpgroup = warp / 4;
    weft::begin(s, [] {});
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    if (warpgroup == 2) {
        weft::warpgroup_reg_dealloc<SERVE_REGISTERS>();
        if (warp % 4 != 0) return;
        weft::PipelineState<STAGES> state;
        each_tile(p, s, [&](const At& t) {
            for (int d = 0; d < depth; ++d) {
                weft::load_stage(s, state, p.a, {t.row, 0, 0}, p.b, t.column, d * weft::BK);
            }
        });
        weft::drain(s, state);
        return;
    }
    weft::warpgroup_reg_alloc<weft::MULTIPLY_REGISTERS>();
    // Behind the counts, aligned to 16 bytes.
    u8* buffer = reinterpret_cast<u8*>(s.counts + weft::COUNTS) + warp * BUFFER_BYTES;
    weft::MultiplyState state;
    each_tile(p, s, [&](const At& t) {
        float sums[weft::ACC_REGS];
        weft::multiply(s, state, warpgroup, depth, sums);
        finish(p, t, warpgroup, buffer, sums);
    });
}
