// Casts matrices to fp8, each by one scale, which is made of its largest number.
//
//   largest  the largest absolute value of each matrix; a NaN is larger than all others. It finds zeros there
//   cast     each matrix by its maximum, which by then may be that of all ranks: [rows, columns], if it is asked for also
//            the transposed [columns, rows], and by what its numbers are multiplied to be what they were
//
// The scale is what fp8 has at most over the maximum, in float64, rounded to float32: the bits of reference.py. No number
// becomes larger than fp8 has any. Of something infinite the scale is 0, of a NaN one.
//
// Matrices lie in whole, rows of a multiple of 16 numbers; if they are transposed, there is a multiple of 16 rows. Nobody
// waits for another block or rank. Graph-safe.
//
// Defined by the includer: DTYPE, of the matrices; E5M2, whether that is the kind of fp8, or e4m3.

#include "ptx/barriers.cuh"
#include "ptx/float8.cuh"
#include "math/numbers.cuh"
#include "math/warp.cuh"

namespace {

using weft::u32;
using weft::u64;
using Number = weft::DTYPE;

constexpr int MOST = 8, THREADS = 256;  // MOST: matrices of a launch
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64;
constexpr int EACH = 8;  // numbers of a row that a thread casts
constexpr int VECTORS = EACH / (4 * Number::PER_WORD), WORDS = 4 * VECTORS, AT_ONCE = 4;
constexpr float LARGEST = E5M2 ? 57344 : 448;
constexpr double SMALLEST = 1e-12;

struct Matrix {
    const uint4* from;
    uint2* numbers;
    u32* transposed;  // or null
    float* inverse;  // of the scale
    int rows, columns;
};

struct Params {
    Matrix of[MOST];
    u32* largest;  // [count], the bits of numbers
    int count;
    int parts;  // blocks of a matrix, of which that looks for the largest number
};

struct Shared {
    float scales[MOST];
    u32 tile[TILE_COLUMNS][TILE_ROWS / 4 + 1];  // a word: four numbers of a column
};

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Magnitudes are in the order of their bits, those of 16 in the upper half of a word.
__device__ __forceinline__ u32 larger(u32 found, u32 word) {
    constexpr u32 MAGNITUDE = Number::PER_WORD == 1 ? 0x7fffffff : 0x7fff0000;
    found = max(found, word & MAGNITUDE);
    return Number::PER_WORD == 1 ? found : max(found, word << 16 & MAGNITUDE);
}

__device__ __forceinline__ void cast_tile(const Matrix& m, float scale, int first_row, int first_column, Shared& shared) {
    const int row = first_row + threadIdx.x / (TILE_COLUMNS / EACH) * 4;
    const int column = first_column + threadIdx.x % (TILE_COLUMNS / EACH) * EACH;
    uint4 taken[4][VECTORS];
    u32 words[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (row + i >= m.rows || column >= m.columns) continue;
        const u64 at = (static_cast<u64>(row + i) * m.columns + column) / EACH;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) taken[i][k] = weft::load_vector(m.from + at * VECTORS + k);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (row + i >= m.rows || column >= m.columns) continue;
        float numbers[EACH];
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            Number::unpack(word_of(taken[i][k / 4], k % 4), numbers + k * Number::PER_WORD);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float* of = numbers + 4 * k;
            const float scaled[4] = {of[0] * scale, of[1] * scale, of[2] * scale, of[3] * scale};
            words[i][k] = weft::pack_float8<E5M2>(scaled);
        }
        const u64 at = (static_cast<u64>(row + i) * m.columns + column) / EACH;
        weft::store_vector(m.numbers + at, uint2{words[i][0], words[i][1]});
    }
    if (m.transposed == nullptr) return;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {  // four rows' bytes of a column
        const int byte = i % 4, two = byte | (byte + 4) << 4;
        const u32 upper = __byte_perm(words[0][i / 4], words[1][i / 4], two);
        const u32 lower = __byte_perm(words[2][i / 4], words[3][i / 4], two);
        shared.tile[column - first_column + i][(row - first_row) / 4] = __byte_perm(upper, lower, 0x5410);
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, their_row = first_row + 4 * lane;
    for (int i = threadIdx.x / 32; i < TILE_COLUMNS && first_column + i < m.columns; i += THREADS / 32) {
        if (their_row >= m.rows) break;
        m.transposed[(static_cast<u64>(first_column + i) * m.rows + their_row) / 4] = shared.tile[i][lane];
    }
    __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) largest(const __grid_constant__ Params p) {
    const int matrix = blockIdx.x / p.parts;
    const Matrix& m = p.of[matrix];
    const u64 vectors = static_cast<u64>(m.rows) * m.columns / (4 * Number::PER_WORD), stride = p.parts * THREADS;
    u32 found = 0;
    for (u64 at = blockIdx.x % p.parts * THREADS + threadIdx.x; at < vectors; at += AT_ONCE * stride) {
        uint4 taken[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool there = at + i * stride < vectors;
            taken[i] = there ? weft::load_vector(m.from + at + i * stride) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 4 * AT_ONCE; ++i) found = larger(found, word_of(taken[i / 4], i % 4));
    }
    found = weft::largest_of_warp(found);
    float number[2];
    Number::unpack(found, number);
    if (threadIdx.x % 32 == 0 && found > 0) atomicMax(p.largest + matrix, __float_as_uint(number[Number::PER_WORD - 1]));
}

extern "C" __global__ void __launch_bounds__(THREADS) cast(const __grid_constant__ Params p) {
    Shared& shared = weft::of_block<Shared>();
    const int own = threadIdx.x;
    if (own < p.count) {
        const double maximum = __uint_as_float(p.largest[own]);
        const float scale = static_cast<float>(1 / (maximum < SMALLEST ? SMALLEST : maximum) * LARGEST);
        shared.scales[own] = scale;
        if (blockIdx.x == 0) *p.of[own].inverse = 1 / scale;
    }
    __syncthreads();
    u32 before = 0;  // tiles of matrices
    for (int i = 0; i < p.count; ++i) {
        const Matrix& m = p.of[i];
        const u32 across = (m.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        const u32 tiles = (m.rows + TILE_ROWS - 1) / TILE_ROWS * across;
        for (u32 tile = (blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x; tile < tiles; tile += gridDim.x) {
            cast_tile(m, shared.scales[i], tile / across * TILE_ROWS, tile % across * TILE_COLUMNS, shared);
        }
        before += tiles;
    }
}
