// The ring of stages that feeds the matmul, and its loader: warp 0 of warpgroup 2, the same for all architectures.
//
// Two blocks form a cluster and compute tiles of the same columns at the same time: each loads half of B for both,
// which takes a third off what a tile of 128 x 256 asks of the L2 cache. (Four, that share A as well, were slower: not
// all SMs can be grouped by four.)
//
// K past the end is zero in both operands: tensor maps fill it in.
//
// Comes after an accumulator.cuh, which says how many arrivals empty a stage.

#pragma once

#include "comm/double_buffer.cuh"
#include "ptx/hopper.cuh"
#include "math/numbers.cuh"
#include "gemm/tile_scheduler.cuh"

namespace weft {

using Number = DTYPE;

constexpr int BK = 64;  // 128 bytes: the width of a swizzled row
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BOXES = (BN + 63) / 64;  // if N is contiguous, of 64 columns each
constexpr int B_BYTES = (B_ROWS ? B_BOXES * 64 : BN) * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CLUSTER = 2;  // blocks

static_assert(!B_ROWS || !B_WHOLE || BN % 64 == 0, "a box begins at a whole group of 64 columns");

constexpr int COUNTS = 36;
constexpr u32 CLOSED = ~0u;  // a count of what is sent: no more will be

struct Shared {
    u8* stages;
    u64* full;  // [STAGES]
    u64* empty;  // [STAGES]
    u64* accumulators;  // [ACCUMULATOR_WORDS], of the main loop
    u32* counts;  // [COUNTS]: the kernel's, 0 at first
    int block;  // of the two in the cluster
};

__device__ __forceinline__ Shared shared_memory(u8* base) {
    Shared s;
    s.stages = base + (1024 - (shared_address(base) & 1023)) % 1024;
    s.full = reinterpret_cast<u64*>(s.stages + STAGES * STAGE_BYTES);
    s.empty = s.full + STAGES;
    s.accumulators = s.empty + STAGES;
    s.counts = reinterpret_cast<u32*>(s.accumulators + ACCUMULATOR_WORDS);
    s.block = rank_in_cluster();
    return s;
}

// Which warp this thread is in; by all of its lanes. The shuffle tells the compiler that they agree, so it keeps what
// depends on it in uniform registers, where wgmma wants the descriptors of its operands.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0); }

// Of the main loop, by all threads: before others use its part of shared memory.
__device__ __forceinline__ void begin_accumulators(const Shared& s);

// By all threads. One of them calls `rest` for all, after the counts' zeros.
template <typename Rest>
__device__ __forceinline__ void begin(const Shared& s, const Rest& rest) {
    begin_accumulators(s);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(s.full + i, 1);
            init_barrier(s.empty + i, STAGE_READERS);
        }
        publish_barriers();
    }
    if (threadIdx.x == 32) {
        for (int i = 0; i < COUNTS; ++i) s.counts[i] = 0;
        rest();
    }
    sync_cluster();
}

// Where a role is in a ring of `N` stages.
template <int N>
struct PipelineState {
    int at = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == N) {
            at = 0;
            parity ^= 1;
        }
    }
};

// A tile's rows of A: box coordinates (k is added) in the map that the caller names.
struct Rows {
    int row, part, batch;
};

// A box of B, for both blocks or for this one. With SPLIT_K maps have one more dimension, so that no box reaches into the
// next part.
template <bool SHARED, typename... At>
__device__ __forceinline__ void load_b(const TensorMap& b, void* to, u64* full, int part, At... at) {
    if constexpr (SHARED && SPLIT_K) {
        tma_load_cluster(b, to, full, at..., part);
    } else if constexpr (SHARED) {
        tma_load_cluster(b, to, full, at...);
    } else {
        tma_load(b, to, full, at..., part);
    }
}

// Loads a half of B of a stage, by one thread: of k, or of the columns. With N contiguous it lies in shared memory as two
// halves of k, each [columns / 64][32][64]; with B_WHOLE one box has all of a half. GATED: a warpgroup has as many columns
// of the first half of B as, after them, of its second. `part`: of B, if it has several; k is counted inside of it.
template <bool SHARED>
__device__ __forceinline__ void load_half_of_b(
    int half, u8* stage, u64* full, const TensorMap& b, int column, int k, int part) {
    if constexpr (B_ROWS && B_WHOLE) {
        load_b<SHARED>(b, stage + A_BYTES + half * (B_BYTES / 2), full, part, 0, k + 32 * half, column / 64);
    } else if constexpr (B_ROWS) {
#pragma unroll
        for (int i = 0; i < B_BOXES; ++i) {
            u8* to = stage + A_BYTES + half * (B_BYTES / 2) + i * 4096;
            load_b<SHARED>(b, to, full, part, column + 64 * i, k + 32 * half);
        }
    } else {
        u8* to = stage + A_BYTES + half * (BN / 2 * 128);
        if constexpr (GATED) {
            load_b<SHARED>(b, to, full, part, k, column / 2 + (WN == BN ? 0 : half * (BN / 4)), WN == BN ? half : 0);
        } else {
            load_b<SHARED>(b, to, full, part, k, column + half * (BN / 2));
        }
    }
}

// Loads B of a stage, by one thread: this block's half for both blocks, which may be ahead or behind: the stage is empty
// in both. Or all of it for this block alone.
template <bool SHARED = true>
__device__ __forceinline__ void load_b_of_stage(
    const Shared& s, u8* stage, u64* full, const TensorMap& b, int column, int k, int part) {
    if constexpr (SHARED) {
        load_half_of_b<true>(s.block, stage, full, b, column, k, part);
    } else {
        load_half_of_b<false>(0, stage, full, b, column, k, part);
        load_half_of_b<false>(1, stage, full, b, column, k, part);
    }
}

// Loads a stage of a tile, by all lanes of a converged warp. `part`: of B. SHARED: both blocks have the same columns.
template <bool SHARED = true>
__device__ __forceinline__ void load_stage(
    const Shared& s, PipelineState<STAGES>& state, const TensorMap& a, const Rows& rows, const TensorMap& b, int column, int k,
    int part = 0) {
    wait(s.empty + state.at, state.parity ^ 1);
    u8* stage = s.stages + state.at * STAGE_BYTES;
    u64* full = s.full + state.at;
    state.next();
    if (!elected()) return;
    arrive_expecting(full, STAGE_BYTES);
    tma_load(a, stage, full, k, rows.row, rows.part, rows.batch);
    load_b_of_stage<SHARED>(s, stage, full, b, column, k, part);
}

// By the loader, after its last stage: until both blocks have read all that it loaded. Then nothing reaches for this
// block's shared memory any more, and it may end.
__device__ __forceinline__ void drain(const Shared& s, PipelineState<STAGES>& state) {
    for (int i = 0; i < STAGES; ++i) {
        wait(s.empty + state.at, state.parity ^ 1);
        state.next();
    }
}

}  // namespace weft
