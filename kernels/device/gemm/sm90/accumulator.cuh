// A tile's accumulator on Hopper: registers of the threads of two warpgroups, as wgmma fills them. gemm.cuh says what
// epilogues know of it.

#pragma once

#include "ptx/hopper.cuh"

namespace weft {

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int THREADS = 3 * GROUP;
constexpr int MULTIPLY_REGISTERS = (504 - SERVE_REGISTERS) / 2;
constexpr int STAGE_READERS = 16;  // the compute warps of both blocks
constexpr int ACCUMULATOR_WORDS = 0;  // of shared memory
constexpr int TILES_AHEAD = 0;  // of the stages' readers to the warpgroups that have the sums
constexpr int WARPGROUPS_M = BM / 64;
constexpr int WN = BN / (2 / WARPGROUPS_M);  // columns of a warpgroup
constexpr int ACC_REGS = WN / 2;  // registers of a thread

static_assert(BM == 64 || BM == 128);
static_assert(WN % 32 == 0 && (!B_ROWS || WARPGROUPS_M == 2 || WN % 64 == 0));

constexpr int SET_COLUMNS = 32;
constexpr int SET_ROWS = 2, SET_PAIRS = 4, PAIR_COLUMNS = 8;
constexpr int VECTOR_ROWS = 8, VECTOR_COLUMNS = 0;

__device__ __forceinline__ constexpr int pair_of_set(int row, int pair) { return 4 * pair + 2 * row; }

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

__device__ __forceinline__ Vectors vectors_of(const u32 (&words)[8]) {
    return {
        transposed(words[0], words[2], words[4], words[6]), transposed(words[1], words[3], words[5], words[7])};
}

// The exchange is its own inverse.
__device__ __forceinline__ void words_of(const Vectors& v, u32 (&words)[8]) {
    const uint4 upper = transposed(v.first.x, v.first.y, v.first.z, v.first.w);
    const uint4 lower = transposed(v.second.x, v.second.y, v.second.z, v.second.w);
    words[0] = upper.x, words[2] = upper.y, words[4] = upper.z, words[6] = upper.w;
    words[1] = lower.x, words[3] = lower.y, words[5] = lower.z, words[7] = lower.w;
}

// Stores vectors to a matrix of `rows` and `columns`, with rows of `stride` elements.
__device__ __forceinline__ void store_vectors(
    u16* out, u64 stride, int rows, int columns, const Place& at, const Vectors& v) {
    u16* to = out + at.row * stride + at.column;
    if (at.column < columns) {
        if (at.row < rows) *reinterpret_cast<uint4*>(to) = v.first;
        if (at.row + VECTOR_ROWS < rows) *reinterpret_cast<uint4*>(to + VECTOR_ROWS * stride) = v.second;
    }
}

__device__ __forceinline__ Place place_of_sums(int warpgroup) {
    const int thread = threadIdx.x % GROUP, lane = thread % 32;
    return {
        warpgroup % WARPGROUPS_M * 64 + thread / 32 * 16 + lane / 4, warpgroup / WARPGROUPS_M * WN + lane % 4 * 2};
}

__device__ __forceinline__ Place place_of_vectors(int warpgroup) {
    const int column = warpgroup / WARPGROUPS_M * WN + threadIdx.x % 4 * 8;
    return {place_of_sums(warpgroup).row, column};
}

}  // namespace weft
