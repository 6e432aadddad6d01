// The matmul that the fused kernels share: one persistent block on an SM, warp-specialised.
//
// A tile of C [BM, BN] is A [BM, K] @ B [K, N]. Warpgroups 0 and 1 compute: with BM = 128 each has 64 rows of the tile,
// with BM = 64 each has half of its columns. Warpgroup 2 serves them: warp 0 loads A and B through a ring of STAGES
// stages, the other warps belong to the kernel.
//
// Two blocks form a cluster and compute tiles of the same columns at the same time: each loads half of B for both,
// which takes a third off what a tile of 128 x 256 asks of the L2 cache. (Four, that share A as well, were slower: not
// all SMs can be grouped by four.)
//
// Accumulators are float32. K past the end is zero in both operands: tensor maps fill it in.
//
// Nothing here waits for another rank. What a kernel does around it is in docs/protocol.md.
//
// Defined by the includer: DTYPE (bfloat16 or float16) and PRODUCT_TYPE, BM, BN, STAGES, B_ROWS (1: N is contiguous in
// B, 0: K), B_WHOLE (N is a multiple of 64) and SPLIT_K (1: B is a stack of parts along K, each with rows of A of its
// own); SERVE_REGISTERS and MULTIPLY_REGISTERS per thread of warpgroup 2 and of the others, 64512 in all.

#pragma once

#include "comm/double_buffer.cuh"
#include "ptx/hopper.cuh"
#include "math/numbers.cuh"
#include "gemm/tile_scheduler.cuh"

namespace weft {

using Number = DTYPE;

constexpr int BK = 64;  // 128 bytes: the width of a swizzled row
constexpr int THREADS = 384;
constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int WARPGROUPS_M = BM / 64;
constexpr int WN = BN / (2 / WARPGROUPS_M);  // columns of a warpgroup
constexpr int ACC_REGS = WN / 2;  // registers of a thread
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BOXES = (BN + 63) / 64;  // if N is contiguous, of 64 columns each
constexpr int B_BYTES = (B_ROWS ? B_BOXES * 64 : BN) * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CLUSTER = 2;  // blocks

static_assert(128 * SERVE_REGISTERS + 256 * MULTIPLY_REGISTERS <= 168 * THREADS, "registers of the block");
static_assert(BM == 64 || BM == 128);
static_assert(!B_ROWS || !B_WHOLE || BN % 64 == 0, "a box begins at a whole group of 64 columns");
static_assert(WN % 32 == 0 && (!B_ROWS || WARPGROUPS_M == 2 || WN % 64 == 0));

constexpr int COUNTS = 36;
constexpr u32 CLOSED = ~0u;  // a count of what is sent: no more will be

struct Shared {
    u8* stages;
    u64* full;  // [STAGES]
    u64* empty;  // [STAGES]
    u32* counts;  // [COUNTS]: the kernel's, 0 at first
    int block;  // of the two in the cluster
};

__device__ __forceinline__ Shared shared_memory(u8* base) {
    Shared s;
    s.stages = base + (1024 - (shared_address(base) & 1023)) % 1024;
    s.full = reinterpret_cast<u64*>(s.stages + STAGES * STAGE_BYTES);
    s.empty = s.full + STAGES;
    s.counts = reinterpret_cast<u32*>(s.empty + STAGES);
    s.block = rank_in_cluster();
    return s;
}

// Which warp this thread is in; by all of its lanes. The shuffle tells the compiler that they agree, so it keeps what
// depends on it in uniform registers, where wgmma wants the descriptors of its operands.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0); }

// By all threads. One of them calls `rest` for all, after the counts' zeros.
template <typename Rest>
__device__ __forceinline__ void begin(const Shared& s, const Rest& rest) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(s.full + i, 1);
            init_barrier(s.empty + i, 16);  // the compute warps of both blocks
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
// halves of k, each [columns / 64][32][64]; with B_WHOLE one box has all of a half. `part`: of B, if it has several; k is
// counted inside of it.
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
        load_b<SHARED>(b, to, full, part, k, column + half * (BN / 2));
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

// What else the main loop does with its rows of A of a stage, by all threads of the warpgroup: nothing.
struct NoMainloopHook {
    __device__ __forceinline__ void begin(int, const u8*) const {}
    __device__ __forceinline__ void end() const {}
};

// The main loop of a tile, by a compute warpgroup. It waits for its wgmma of a stage before it takes the next: the
// other warpgroup's keep the tensor cores busy meanwhile, and the stage is released a stage's time earlier, on which
// the loads depend: one takes as long as two stages of wgmma. `hook` gets the number of the stage and the warpgroup's
// rows of A, 64 of 128 bytes, and has done with them at its end.
template <typename MainloopHook = NoMainloopHook>
__device__ __forceinline__ void multiply(
    const Shared& s, PipelineState<STAGES>& state, int warpgroup, int depth, float (&sums)[ACC_REGS],
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

// Four lanes side by side hold words of four vectors, lane i word i of each: afterwards lane i holds vector i.
__device__ __forceinline__ uint4 transposed(u32 a, u32 b, u32 c, u32 d) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const u32 ab = __shfl_xor_sync(~0u, odd ? a : b, 1);
    const u32 cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
    (odd ? a : b) = ab;
    (odd ? c : d) = cd;
    const u32 first = __shfl_xor_sync(~0u, high ? a : c, 2);
    const u32 second = __shfl_xor_sync(~0u, high ? b : d, 2);
    return high ? make_uint4(first, second, c, d) : make_uint4(a, b, first, second);
}

// Of a tile, where sums[0] of this thread is. sums[4 j + 2 r + e] is 8 r rows below it, and 8 j + e columns to the
// right.
struct Place {
    int row, column;
};

__device__ __forceinline__ Place place_of_sums(int warpgroup) {
    const int thread = threadIdx.x % GROUP, lane = thread % 32;
    return {
        warpgroup % WARPGROUPS_M * 64 + thread / 32 * 16 + lane / 4, warpgroup / WARPGROUPS_M * WN + lane % 4 * 2};
}

// Stores a warpgroup's fragment of a tile to `out`, where the tile begins in a matrix with rows of `stride` elements,
// as far as it has `rows` and `columns`. `finish(i, values)` gets the 16 of 32 columns before they are rounded: sums[16
// i] and on.
template <typename Finish>
__device__ __forceinline__ void store_rows(
    u16* out, u64 stride, int rows, int columns, int warpgroup, const float (&sums)[ACC_REGS], Finish&& finish) {
    const int row = place_of_sums(warpgroup).row;
    const int column = warpgroup / WARPGROUPS_M * WN + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < WN / 32; ++i) {
        float v[16];
#pragma unroll
        for (int e = 0; e < 16; ++e) v[e] = sums[16 * i + e];
        finish(i, v);
        const uint4 upper = transposed(Number::pack(v), Number::pack(v + 4), Number::pack(v + 8), Number::pack(v + 12));
        const uint4 lower =
            transposed(Number::pack(v + 2), Number::pack(v + 6), Number::pack(v + 10), Number::pack(v + 14));
        u16* to = out + row * stride + column + 32 * i;
        if (column + 32 * i < columns) {
            if (row < rows) *reinterpret_cast<uint4*>(to) = upper;
            if (row + 8 < rows) *reinterpret_cast<uint4*>(to + 8 * stride) = lower;
        }
    }
}

// The same in float32, each number where its thread holds it: four lanes fill 32 bytes of a row.
template <typename Finish>
__device__ __forceinline__ void store_rows(
    float* out, u64 stride, int rows, int columns, int warpgroup, const float (&sums)[ACC_REGS], Finish&& finish) {
    const Place first = place_of_sums(warpgroup);
    const int row = first.row;
#pragma unroll
    for (int i = 0; i < WN / 32; ++i) {
        float v[16];
#pragma unroll
        for (int e = 0; e < 16; ++e) v[e] = sums[16 * i + e];
        finish(i, v);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = first.column + 32 * i + 8 * j;
            float* to = out + row * stride + column;
            if (column < columns) {
                if (row < rows) *reinterpret_cast<float2*>(to) = make_float2(v[4 * j], v[4 * j + 1]);
                if (row + 8 < rows) {
                    *reinterpret_cast<float2*>(to + 8 * stride) = make_float2(v[4 * j + 2], v[4 * j + 3]);
                }
            }
        }
    }
}

}  // namespace weft
