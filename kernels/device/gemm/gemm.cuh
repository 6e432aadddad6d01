// The matmul that the fused kernels share: one persistent block on an SM, warp-specialised.
//
// A tile of C [BM, BN] is A [BM, K] @ B [K, N]. Warpgroups 0 and 1 get its sums; warpgroup 2 serves them: warp 0 loads A
// and B through a ring of STAGES stages (stages.cuh), the other warps belong to the kernel. Who multiplies, and where
// sums add up meanwhile, is the architecture's: sm90/ or sm100/.
//
// Sums are float32. A thread of warpgroup 0 or 1 gets ACC_REGS of them, in sets of 16. A set is SET_PAIRS pairs of sums
// side by side in each of SET_ROWS rows. Pair j of row r is sums 16 i + pair_of_set(r, j) and the next one of set i, 8 r
// rows below `place_of_sums` and SET_COLUMNS i + PAIR_COLUMNS j columns to the right of it. `vectors_of` makes two vectors
// of 8 columns of a set's words, each a pair: from `place_of_vectors` on, VECTOR_ROWS rows and VECTOR_COLUMNS columns
// apart. It is by whole warps, whose lanes may trade words for that. `words_of` is its inverse.
//
// Nothing here waits for another rank. What a kernel does around it is in docs/protocol.md.
//
// Defined by the includer: DTYPE (bfloat16 or float16) and PRODUCT_TYPE, BM, BN, STAGES, B_ROWS (1: N is contiguous in
// B, 0: K), B_WHOLE (N is a multiple of 64) and SPLIT_K (1: B is a stack of parts along K, each with rows of A of its
// own), GATED (1: B is two halves along N, its maps have one more dimension for them, and each warpgroup has the same
// columns of both); SERVE_REGISTERS per thread of warpgroup 2: warpgroups 0 and 1 get what is left, MULTIPLY_REGISTERS.

#pragma once

#include "ptx/hopper.cuh"

#ifndef GATED
#define GATED 0
#endif

namespace weft {

// Of a tile, or of a set of sums.
struct Place {
    int row, column;
};

struct Vectors {
    uint4 first, second;
};

// What else is done with the rows of A of a stage before it is released, 64 of 128 bytes each: nothing.
struct NoMainloopHook {
    __device__ __forceinline__ void begin(int, const u8*) const {}
    __device__ __forceinline__ void end() const {}
};

}  // namespace weft

#if __CUDA_ARCH__ / 100 == 10
#define TENSOR_MEMORY 1
#include "gemm/sm100/main_loop.cuh"
#else
#define TENSOR_MEMORY 0
#include "gemm/sm90/main_loop.cuh"
#endif

namespace weft {

// values[0] and [1] += the two numbers of a word.
__device__ __forceinline__ void add_pair(u32 word, float* values) {
    float pair[2];
    Number::unpack(word, pair);
    values[0] += pair[0];
    values[1] += pair[1];
}

// Adds a bias [n] to a set of sums, the first of which are of column `column`; columns past the end get that of the last.
__device__ __forceinline__ void add_bias(const u16* bias, int column, int n, float* values) {
#pragma unroll
    for (int j = 0; j < SET_PAIRS; ++j) {
        const int at = min(column + PAIR_COLUMNS * j, n - 2);
        const u32 word = __ldg(reinterpret_cast<const u32*>(bias + at));
#pragma unroll
        for (int r = 0; r < SET_ROWS; ++r) add_pair(word, values + pair_of_set(r, j));
    }
}

// Stores a warpgroup's sums of a tile to `out`, where the tile begins in a matrix with rows of `stride` elements, as far
// as it has `rows` and `columns`. `finish(i, values)` gets those of set i before they are rounded.
template <int NUMBERS, typename Finish>
__device__ __forceinline__ void store_rows(
    u16* out, u64 stride, int rows, int columns, int warpgroup, const float (&sums)[NUMBERS], Finish&& finish) {
    const Place first = place_of_vectors(warpgroup);
#pragma unroll
    for (int i = 0; i < NUMBERS / 16; ++i) {
        float v[16];
#pragma unroll
        for (int e = 0; e < 16; ++e) v[e] = sums[16 * i + e];
        finish(i, v);
        u32 words[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) words[j] = Number::pack(v + 2 * j);
        store_vectors(out, stride, rows, columns, {first.row, first.column + SET_COLUMNS * i}, vectors_of(words));
    }
}

// The same in float32, each pair where its thread has it.
template <typename Finish>
__device__ __forceinline__ void store_rows(
    float* out, u64 stride, int rows, int columns, int warpgroup, const float (&sums)[ACC_REGS], Finish&& finish) {
    const Place first = place_of_sums(warpgroup);
#pragma unroll
    for (int i = 0; i < ACC_REGS / 16; ++i) {
        float v[16];
#pragma unroll
        for (int e = 0; e < 16; ++e) v[e] = sums[16 * i + e];
        finish(i, v);
#pragma unroll
        for (int j = 0; j < SET_PAIRS; ++j) {
            const int column = first.column + SET_COLUMNS * i, right = PAIR_COLUMNS * j;
            float* to = out + first.row * stride + column + right;
            if (column + right / 8 * 8 < columns) {  // there are a multiple of 8
#pragma unroll
                for (int r = 0; r < SET_ROWS; ++r) {
                    const float* pair = v + pair_of_set(r, j);
                    if (first.row + 8 * r < rows) {
                        *reinterpret_cast<float2*>(to + 8 * r * stride) = make_float2(pair[0], pair[1]);
                    }
                }
            }
        }
    }
}

}  // namespace weft
