// A tile's accumulator on Blackwell: in tensor memory, row i in lane i. A thread of warpgroup 0 or 1 gets half of a row,
// into registers: warp i of a warpgroup reaches lanes 32 i to 32 i + 31. gemm.cuh says what epilogues know of it.

#pragma once

#include "ptx/blackwell.cuh"
#include "ptx/hopper.cuh"

namespace weft {

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int THREADS = 4 * GROUP;  // the last warpgroup's first warp issues the products
constexpr int ISSUE_REGISTERS = 24;
constexpr int MULTIPLY_REGISTERS = (512 - SERVE_REGISTERS - ISSUE_REGISTERS) / 2;
constexpr int STAGE_READERS = 2;  // the tensor cores of both blocks
constexpr int ACCUMULATORS = 2;  // one fills up while the other one is read
constexpr int ACCUMULATOR_WORDS = 2 * ACCUMULATORS + 1;  // barriers and the address
constexpr int TILES_AHEAD = ACCUMULATORS;  // of the issuer to the warpgroups that have the sums
constexpr int TENSOR_COLUMNS = BN > 128 ? 512 : 256;  // a power of two
constexpr int WN = BN / 2;  // columns of a warpgroup
constexpr int ACC_REGS = WN;  // registers of a thread

static_assert(BM == 128 && (BN == 128 || BN == 192 || BN == 256), "rows as lanes, whole groups of 64 columns");

constexpr int SET_COLUMNS = 16;
constexpr int SET_ROWS = 1, SET_PAIRS = 8, PAIR_COLUMNS = 2;
constexpr int VECTOR_ROWS = 0, VECTOR_COLUMNS = 8;

__device__ __forceinline__ constexpr int pair_of_set(int, int pair) { return 2 * pair; }

__device__ __forceinline__ Vectors vectors_of(const u32 (&words)[8]) {
    return {
        make_uint4(words[0], words[1], words[2], words[3]), make_uint4(words[4], words[5], words[6], words[7])};
}

__device__ __forceinline__ void words_of(const Vectors& v, u32 (&words)[8]) {
    words[0] = v.first.x, words[1] = v.first.y, words[2] = v.first.z, words[3] = v.first.w;
    words[4] = v.second.x, words[5] = v.second.y, words[6] = v.second.z, words[7] = v.second.w;
}

// Stores vectors to a matrix of `rows` and `columns`, with rows of `stride` elements.
__device__ __forceinline__ void store_vectors(
    u16* out, u64 stride, int rows, int columns, const Place& at, const Vectors& v) {
    u16* to = out + at.row * stride + at.column;
    if (at.row < rows) {
        if (at.column < columns) *reinterpret_cast<uint4*>(to) = v.first;
        if (at.column + VECTOR_COLUMNS < columns) *reinterpret_cast<uint4*>(to + VECTOR_COLUMNS) = v.second;
    }
}

__device__ __forceinline__ Place place_of_sums(int warpgroup) {
    return {static_cast<int>(threadIdx.x % GROUP), warpgroup * WN};
}

__device__ __forceinline__ Place place_of_vectors(int warpgroup) { return place_of_sums(warpgroup); }

}  // namespace weft
