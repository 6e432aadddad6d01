// A grouped product: C[i] = A[i] @ B[e] + bias[e] for the rows i of each expert e, from ends[e - 1] to ends[e].
//
// A [R, K], B [E, K, N], C [R, N], ends [E] int32. Up to MOST_BS B share one A. Accumulators are float32. Experts may
// have any number of rows, also none. Rows of C that no expert has are not written. GATED: B's columns are those of gate
// and of up; C is silu(gate) * up, of N / 2 columns, where neither is rounded.
//
// Which tiles there are is found from the groups by each block (groups.cuh), so a captured launch may be replayed with
// other counts. TMA of Hopper gathers no rows: those that are taken by index are copied into their order before
// (take_rows.cu). Copied to shared memory while stages are loaded they cost more, by threads as by boxes of one row
// (bench/results/h200-x1-grouped-matmul.txt).
//
// It waits for no other rank. Whatever `ends` hold, nothing outside of the tensors is read or written.

#define SERVE_REGISTERS 72
#include "gemm/gemm.cuh"
#include "groups.cuh"

using weft::u16;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int MOST_BS = 4;
constexpr int WIDTH = GATED + 1;  // columns of B for one of C
constexpr int NUMBERS = weft::ACC_REGS / WIDTH;  // of C, of a thread

static_assert(!GATED || weft::WN / 2 % weft::SET_COLUMNS == 0);

struct Params {
    weft::TensorMap a;  // [1, 1, R, K], boxes of a stage
    weft::TensorMap b[MOST_BS];  // [E, K, N] each
    const int* ends;
    const u16* bias[MOST_BS];  // [E, N], or null
    u16* c[MOST_BS];
    int n[MOST_BS];
    int columns[MOST_BS];  // of tiles, of each
    int bs, all_columns;
    int total;  // R
    int groups;  // experts
    int k;
    int raster_group;  // pairs of rows of tiles in a raster group
};

using Groups = weft::GroupScheduler<Params>;
using weft::GroupTile;

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
                weft::load_stage<false>(s, state, p.a, rows, p.b[t.b], t.column * BN, d * weft::BK, t.expert);
            } else {
                weft::load_stage(s, state, p.a, rows, p.b[t.b], t.column * BN, d * weft::BK, t.expert);
            }
        }
    }
    weft::drain(s, state);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    grouped_matmul(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    int* steps_up_to = reinterpret_cast<int*>(s.counts + weft::COUNTS);
    const int warp = weft::warp_of_block(), warpgroup = warp / 4;
    Groups::count(p, steps_up_to);
    __syncthreads();
    if (warp == 2) Groups::add_up(p, steps_up_to);
    weft::begin(s, [] {});
    Groups groups(p, steps_up_to);
    if (warpgroup == 2) {
        weft::warpgroup_reg_dealloc<SERVE_REGISTERS>();
        load(p, s, groups);
        return;
    }
    const int depth = (p.k + weft::BK - 1) / weft::BK;
#if TENSOR_MEMORY
    if (warpgroup == 3) {
        weft::warpgroup_reg_dealloc<weft::ISSUE_REGISTERS>();
        if (warp != 12) return;
        weft::Issuer issuer(s);
        for (int step = blockIdx.x / weft::CLUSTER; step < groups.steps(); step += gridDim.x / weft::CLUSTER) {
            issuer.multiply(depth);
        }
        issuer.end();
        return;
    }
#endif
    weft::warpgroup_reg_alloc<weft::MULTIPLY_REGISTERS>();
    weft::MultiplyState state;
    for (int step = blockIdx.x / weft::CLUSTER; step < groups.steps(); step += gridDim.x / weft::CLUSTER) {
        const GroupTile t = groups.tile(step, s.block);
        float sums[weft::ACC_REGS];
        weft::multiply(s, state, warpgroup, depth, sums);
        // Of C a warpgroup has half as many columns as of gate and up.
        const int of_part = weft::place_of_sums(warpgroup).column, apart = GATED * (of_part / weft::WN) * (weft::WN / 2);
        const int column = t.column * (BN / WIDTH) - apart, n = p.n[t.b];
        const u16* bias = p.bias[t.b] == nullptr ? nullptr : p.bias[t.b] + static_cast<u64>(t.expert) * WIDTH * n;
        u16* c = p.c[t.b] + static_cast<u64>(t.row) * n + column;
        const auto& first = reinterpret_cast<const float(&)[NUMBERS]>(sums);
        weft::store_rows(c, n, t.end - t.row, n - column, warpgroup, first, [&](int i, float* v) {
            const int of_set = column + of_part + weft::SET_COLUMNS * i;
            if (bias != nullptr) weft::add_bias(bias, of_set, n, v);
#if GATED
            float up[16];
#pragma unroll
            for (int e = 0; e < 16; ++e) up[e] = sums[NUMBERS + 16 * i + e];
            if (bias != nullptr) weft::add_bias(bias + n, of_set, n, up);
#pragma unroll
            for (int e = 0; e < 16; ++e) v[e] = up[e] * __fdividef(v[e], 1 + __expf(-v[e]));
#endif
        });
    }
}
