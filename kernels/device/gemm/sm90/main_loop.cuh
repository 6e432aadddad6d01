// The main loop of a tile on Hopper, by wgmma: each compute warpgroup multiplies what its registers add up. With BM = 128
// it has 64 rows of the tile, with BM = 64 half of its columns.

#pragma once

#include "gemm/sm90/accumulator.cuh"
#include "gemm/stages.cuh"

namespace weft {

using MultiplyState = PipelineState<STAGES>;

__device__ __forceinline__ void begin_accumulators(const Shared&) {}

// A warp has read a stage: arrives at the barriers of both blocks' loaders.
__device__ __forceinline__ void release(u64* empty) {
    arrive_at(empty, 0);
    arrive_at(empty, 1);
}

// sums [64, N] += a [64, 16] @ b [16, N], or = if `add` is 0. An instruction has up to 256 columns.
template <int N>
__device__ __forceinline__ void product(float (&sums)[N / 2], u64 a, u64 b, int add) {
    if constexpr (N <= 256) {
        Wgmma<N>::template run<B_ROWS>(sums, a, b, add);
    } else {
        constexpr int FIRST = 192, B_BYTES_OF_FIRST = B_ROWS ? FIRST / 64 * 4096 : FIRST * 128;
        product<FIRST>(reinterpret_cast<float(&)[FIRST / 2]>(sums[0]), a, b, add);
        product<N - FIRST>(
            reinterpret_cast<float(&)[(N - FIRST) / 2]>(sums[FIRST / 2]), a, b + (B_BYTES_OF_FIRST >> 4), add);
    }
}

// The main loop of a tile, by a compute warpgroup. It waits for its wgmma of a stage before it takes the next: the
// other warpgroup's keep the tensor cores busy meanwhile, and the stage is released a stage's time earlier, on which
// the loads depend: one takes as long as two stages of wgmma. `hook` gets the number of the stage and the warpgroup's
// rows of A, 64 of 128 bytes, and has done with them at its end.
template <typename MainloopHook = NoMainloopHook>
__device__ __forceinline__ void multiply(
    const Shared& s, MultiplyState& state, int warpgroup, int depth, float (&sums)[ACC_REGS],
    const MainloopHook& hook = {}) {
    const int m = warpgroup % WARPGROUPS_M, n = warpgroup / WARPGROUPS_M;
    const bool first_lane = threadIdx.x % 32 == 0;
    constexpr u32 LEADING = B_ROWS ? 4096 : 0;
    constexpr int B_COLUMNS = B_ROWS ? WN * 64 : WN * 128;  // bytes of a warpgroup's columns, in a half of k or in all
    for (int i = 0; i < depth; ++i) {
        u8* stage = s.stages + state.at * STAGE_BYTES;
        const u64 a = smem_descriptor(stage + m * 64 * 128, 0, 1024);
        const u64 b = smem_descriptor(stage + A_BYTES + n * B_COLUMNS, LEADING, 1024);
        wait(s.full + state.at, state.parity);
        hook.begin(i, stage + m * 64 * 128);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k) {
            const int b_at = B_ROWS ? k / 2 * (B_BYTES / 2) + k % 2 * 2048 : k * 32;
            product<WN>(sums, a + k * 2, b + (b_at >> 4), i + k);
        }
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        hook.end();
        if (first_lane) release(s.empty + state.at);
        state.next();
    }
}

}  // namespace weft
