// A grouped product: C[i] = A[rows[i]] @ B[e] + bias[e] for the rows i of each expert e, from offs[e - 1] to offs[e].
//
// A [T, K], B [E, K, N], C [R, N], rows [R] and offs [E] int32; without BY_ROWS row i of A is row i of C. Accumulators
// are float32. Experts may have any number of rows, also none. Rows of C that no expert has are not written.
//
// Which tiles there are is found from `offs` by each block (groups.cuh), so a captured launch may be replayed with other
// counts. Rows of A are taken by index while stages are loaded: TMA of Hopper gathers no rows, so the four warps of
// warpgroup 2 copy them with cp.async, 16 bytes a thread, to where TMA would put them. Each thread's copies arrive at the
// stage's barrier by themselves, and whoever multiplies fences them for wgmma: all stages are under way at once.
//
// It waits for no other rank. Whatever `offs` and `rows` hold, nothing outside of the tensors is read or written.

#define SERVE_REGISTERS 72
#define MULTIPLY_REGISTERS 216
#if BY_ROWS
#define A_THREADS 128
#endif
#include "gemm/gemm.cuh"
#include "groups.cuh"

using weft::u16;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

struct Params {
    weft::TensorMap a;  // without BY_ROWS [1, 1, R, K], boxes of a stage
    weft::TensorMap b;  // [E, K, N]
    const u16* from;  // A, rows `stride` elements apart
    const int* rows;
    const int* offs;
    const u16* bias;  // [E, N], or null
    u16* c;
    int tokens, total, experts;  // T, R, E
    int n, k, stride;
    int columns;  // of tiles
    int raster_group;  // pairs of rows of tiles in a raster group
};

using Groups = weft::GroupScheduler<Params>;
using weft::GroupTile;

#if BY_ROWS
constexpr int ROWS_AT_ONCE = weft::GROUP / 8;  // eight threads copy 128 bytes of a row
constexpr int COPIES = BM / ROWS_AT_ONCE;  // of a thread, for a stage

// By warpgroup 2: loads the operands of the compute warpgroups.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, Groups groups) {
    const int thread = threadIdx.x % weft::GROUP, vector = thread % 8, first = thread / 8;
    const int warp = weft::warp_of_block() % 4, depth = (p.k + weft::BK - 1) / weft::BK;
    weft::PipelineState<STAGES> state;
    for (int step = blockIdx.x / weft::CLUSTER; step < groups.steps(); step += gridDim.x / weft::CLUSTER) {
        const GroupTile t = groups.tile(step, s.block);
        const u16* from[COPIES];
        u32 there = 0;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int row = t.row + first + i * ROWS_AT_ONCE;
            from[i] = p.from;
            if (row >= t.end) continue;
            const int token = min(max(__ldg(p.rows + row), 0), p.tokens - 1);
            from[i] += static_cast<u64>(token) * p.stride + vector * 8;
            there |= 1u << i;
        }
        for (int d = 0; d < depth; ++d) {
            weft::wait(s.empty + state.at, state.parity ^ 1);
            u8* stage = s.stages + state.at * weft::STAGE_BYTES;
            u64* full = s.full + state.at;
            state.next();
            if (warp == 0 && weft::elected()) {
                weft::arrive_expecting(full, weft::B_BYTES);
                if (t.wide) {
                    weft::load_b_of_stage<false>(s, stage, full, p.b, t.column * BN, d * weft::BK, t.expert);
                } else {
                    weft::load_b_of_stage(s, stage, full, p.b, t.column * BN, d * weft::BK, t.expert);
                }
            }
            const bool inside = d * weft::BK + vector * 8 < p.k;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const bool copied = inside && (there >> i & 1);
                weft::copy_async(
                    stage + weft::swizzled(first + i * ROWS_AT_ONCE, vector), copied ? from[i] + d * weft::BK : p.from,
                    copied);
            }
            weft::arrive_when_copied(full);
        }
    }
    weft::drain(s, state);
}

struct MainloopHook : weft::NoMainloopHook {
    __device__ __forceinline__ void begin(int, const u8*) const { weft::fence_proxy_async(); }
};
#else
using MainloopHook = weft::NoMainloopHook;

// By warp 0 of warpgroup 2.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, Groups groups) {
    if (weft::warp_of_block() % 4 != 0) return;
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    weft::PipelineState<STAGES> state;
    for (int step = blockIdx.x / weft::CLUSTER; step < groups.steps(); step += gridDim.x / weft::CLUSTER) {
        const GroupTile t = groups.tile(step, s.block);
        for (int d = 0; d < depth; ++d) {
            const weft::Rows rows = {t.row, 0, 0};
            if (t.wide) {
                weft::load_stage<false>(s, state, p.a, rows, p.b, t.column * BN, d * weft::BK, t.expert);
            } else {
                weft::load_stage(s, state, p.a, rows, p.b, t.column * BN, d * weft::BK, t.expert);
            }
        }
    }
    weft::drain(s, state);
}
#endif

// Adds an expert's bias to 16 sums of a thread, of 32 columns from `column` on.
__device__ __forceinline__ void add_bias(const u16* bias, int column, int n, float* v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float more[2];
        weft::Number::unpack(__ldg(reinterpret_cast<const u32*>(bias + min(column + 8 * j, n - 2))), more);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[4 * j + e] += more[e % 2];
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    grouped_matmul(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    int* ends = reinterpret_cast<int*>(s.counts + weft::COUNTS);
    const int warp = weft::warp_of_block(), warpgroup = warp / 4;
    Groups::count(p, ends);
    __syncthreads();
    if (warp == 2) Groups::add_up(p, ends);
    weft::begin(s, [] {});
    Groups groups(p, ends);
    if (warpgroup == 2) {
        weft::warpgroup_reg_dealloc<SERVE_REGISTERS>();
        load(p, s, groups);
        return;
    }
    weft::warpgroup_reg_alloc<MULTIPLY_REGISTERS>();
    weft::PipelineState<STAGES> state;
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    for (int step = blockIdx.x / weft::CLUSTER; step < groups.steps(); step += gridDim.x / weft::CLUSTER) {
        const GroupTile t = groups.tile(step, s.block);
        float sums[weft::ACC_REGS];
        weft::multiply(s, state, warpgroup, depth, sums, MainloopHook());
        const int column = t.column * BN;
        const u16* bias = p.bias == nullptr ? nullptr : p.bias + static_cast<u64>(t.expert) * p.n;
        const int of_thread = column + weft::place_of_sums(warpgroup).column;
        u16* c = p.c + static_cast<u64>(t.row) * p.n + column;
        weft::store_rows(c, p.n, t.end - t.row, p.n - column, warpgroup, sums, [&](int i, float* v) {
            if (bias != nullptr) add_bias(bias, of_thread + 32 * i, p.n, v);
        });
    }
}
