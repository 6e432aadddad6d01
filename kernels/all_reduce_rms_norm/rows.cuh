// The rows of kernel.cu: how they are shared out, summed and normed.
//
//   CLUSTER, VECTORS  blocks of a team; vectors of a row that a thread holds
//   RESIDUAL          1: something is added to what is reduced
//   ROUND_SUM         1: the rounded sum is normed, 0: the sum in float32
//   SUBTRACT_MEAN     1: the mean of the row is taken away first, as in LayerNorm; of the rounded sum
//   WEIGHT, BIAS      whether there is one; of the dtype of x, or float32 with WIDE_WEIGHT
//   OFFSET            1: a number is added to the weight
//   QUANT             the normed rows become fp8, see quant.cuh

#pragma once

#include "comm/ll_exchange.cuh"
#include "collective/combine.cuh"
#include "math/cluster_moments.cuh"
#include "quant.cuh"

#ifndef CLUSTER
#error "CLUSTER, VECTORS: blocks of a team; vectors of a row that a thread holds"
#endif
#if SUBTRACT_MEAN && !ROUND_SUM
#error "SUBTRACT_MEAN: is of the rounded sum"
#endif
#if SUBTRACT_MEAN && QUANT
#error "QUANT: is of RMSNorms"
#endif

namespace {

using weft::ELEMENTS;
using weft::Numbers;
using weft::Epoch;
using weft::u32;
using Sum = weft::reduce::sum;

constexpr int WARPS = 16;  // of a block, at most
constexpr int TERMS = CLUSTER * WARPS * VECTORS;  // of a row, at most

struct Params {
    weft::ExchangeSlots slots;
    const uint4* x;
    const uint4* residual;
    const uint4* weight;
    const uint4* bias;
    void* normed;  // or with QUANT the same in fp8
    uint4* sums;
    u32* scales;  // with QUANT 1 the one that is given, with 2 those of the rows, which are written
    double smallest;  // of the rows' scales, or of what they are made of
    u32 rows;
    u32 vectors;  // of a row
    float eps;
    float elements;  // of a row
    float offset;    // of the weight
#if CHOICES
    weft::Combine combine;  // x
#endif
};

// Where this thread's vectors lie: `chunk(v)` among the row's chunks, `at(v)` in the row, `index(v)` in a slot row.
struct RowShare {
    u32 first, step, vectors;

    __device__ __forceinline__ RowShare(const Params& p, u32 block) {
        first = threadIdx.x / 32 * CLUSTER + block;
        step = blockDim.x / 32 * CLUSTER;
        vectors = p.vectors;
    }

    __device__ __forceinline__ u32 chunk(int v) const { return first + v * step; }
    __device__ __forceinline__ u32 at(int v) const { return chunk(v) * 32 + threadIdx.x % 32; }
    __device__ __forceinline__ bool has(int v) const { return at(v) < vectors; }
    __device__ __forceinline__ u32 index(int v) const { return v * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ u32 chunks() const { return (vectors + 31) / 32; }

    // Of a chunk; of one past the end as of a whole one.
    __device__ __forceinline__ float elements(u32 chunk) const {
        const u32 before = chunk * 32;
        return ELEMENTS * (before < vectors && vectors - before < 32 ? vectors - before : 32);
    }
};

// A vector of what is normed.
struct RowSum {
#if ROUND_SUM
    uint4 kept;
    __device__ __forceinline__ Numbers numbers() const { return Numbers(kept); }
    __device__ __forceinline__ uint4 rounded() const { return kept; }
    __device__ __forceinline__ void keep(const Numbers& sum) { kept = sum.rounded(); }
#else
    float kept[ELEMENTS];
    __device__ __forceinline__ Numbers numbers() const {
        Numbers sum(make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) sum.of[i] = kept[i];
        return sum;
    }
    __device__ __forceinline__ uint4 rounded() const { return numbers().rounded(); }
    __device__ __forceinline__ void keep(const Numbers& sum) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) kept[i] = sum.of[i];
    }
#endif
};

// The weights, or the biases, of a vector's numbers.
struct Columns {
#if WIDE_WEIGHT
    static constexpr int LOADS = ELEMENTS / 4;
#else
    static constexpr int LOADS = 1;
#endif
    uint4 loaded[LOADS];

    __device__ __forceinline__ void load(const uint4* columns, u32 at) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) loaded[i] = weft::load_vector(columns + at * LOADS + i);
    }

    __device__ __forceinline__ void of(float (&numbers)[ELEMENTS]) const {
#if WIDE_WEIGHT
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            numbers[4 * i] = __uint_as_float(loaded[i].x);
            numbers[4 * i + 1] = __uint_as_float(loaded[i].y);
            numbers[4 * i + 2] = __uint_as_float(loaded[i].z);
            numbers[4 * i + 3] = __uint_as_float(loaded[i].w);
        }
#else
        const Numbers packed(loaded[0]);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) numbers[i] = packed.of[i];
#endif
    }
};

// What a vector of a normed row is multiplied by, and what is added to it.
struct Affine {
#if WEIGHT
    Columns weight;
#endif
#if BIAS
    Columns bias;
#endif

    __device__ __forceinline__ void load(const Params& p, u32 at) {
#if WEIGHT
        weight.load(p.weight, at);
#endif
#if BIAS
        bias.load(p.bias, at);
#endif
    }

    __device__ __forceinline__ void apply(Numbers& numbers, float offset) const {
        float columns[ELEMENTS];
#if WEIGHT
        weight.of(columns);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) numbers.of[i] *= OFFSET ? columns[i] + offset : columns[i];
#endif
#if BIAS
        bias.of(columns);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) numbers.of[i] += columns[i];
#endif
    }
};

__device__ __forceinline__ RowSum plus(const uint4& reduced, const uint4& residual) {
    RowSum sum;
#if RESIDUAL
    Numbers total(reduced);
    const Numbers more(residual);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) total.of[i] += more.of[i];
    sum.keep(total);
#else
    sum.kept = reduced;
#endif
    return sum;
}

template <typename Vector>
__device__ __forceinline__ Vector* vector(Vector* rows, const Params& p, u32 row, u32 at) {
    return rows + static_cast<weft::u64>(row) * p.vectors + at;
}

__device__ __forceinline__ uint4 row_or_zeros(const uint4* rows, const Params& p, u32 row, u32 at) {
    return row < p.rows ? weft::load_vector(vector(rows, p, row, at)) : make_uint4(0, 0, 0, 0);
}

// A vector of this rank's part of the sum.
__device__ __forceinline__ uint4 input_of(const Params& p, u32 row, u32 at) {
#if CHOICES
    return p.combine.load(row, at);
#else
    return weft::load_vector(vector(p.x, p, row, at));
#endif
}

__device__ __forceinline__ uint4 input_or_zeros(const Params& p, u32 row, u32 at) {
    return row < p.rows ? input_of(p, row, at) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ uint4 residual_of(const Params& p, u32 row, u32 at) {
#if RESIDUAL
    return weft::load_vector(vector(p.residual, p, row, at));
#else
    return make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ uint4 residual_or_zeros(const Params& p, u32 row, u32 at) {
    return row < p.rows ? residual_of(p, row, at) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ uint4* normed_vector(const Params& p, u32 row, u32 at) {
    return vector(static_cast<uint4*>(p.normed), p, row, at);
}

__device__ __forceinline__ u32* quantized_vector(const Params& p, u32 row, u32 at) {
    return static_cast<u32*>(p.normed) + (static_cast<weft::u64>(row) * p.vectors + at) * QUANT_WORDS;
}

// Where two_shot keeps the totals of its own rows when the sum that is stored is not the one that is normed: until that
// of the row takes its place. Of fp8 there is no room.
__device__ __forceinline__ uint4* totals(const Params& p) { return QUANT ? p.sums : static_cast<uint4*>(p.normed); }

// How a row is normed.
struct Norm {
    float scale;
#if SUBTRACT_MEAN
    float mean;
#endif

    __device__ __forceinline__ uint4 of(const RowSum& sum, const Affine& affine, const Params& p) const {
        Numbers result = sum.numbers();
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
#if SUBTRACT_MEAN
            result.of[i] -= mean;
#endif
            result.of[i] *= scale;
        }
        affine.apply(result, p.offset);
        return result.rounded();
    }
};

__device__ __forceinline__ float largest_of(const Numbers& numbers) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) largest = max(largest, __float_as_uint(numbers.of[i]) & 0x7fffffffu);
    return __uint_as_float(largest);
}

// Sums of what numbers are away from `from`, and of the squares of that.
__device__ __forceinline__ void moments(const Numbers& numbers, float from, float& first, float& second) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const float apart = numbers.of[i] - from;
        first += apart;
        second += apart * apart;
    }
}

// The blocks that norm ROWS rows at once.
template <int ROWS>
struct Team {
#if SUBTRACT_MEAN
    weft::ClusterMoments<CLUSTER, TERMS, ROWS> reduce;
#else
    weft::ClusterReduce<CLUSTER, TERMS, ROWS> reduce;
#endif

    __device__ __forceinline__ Team() : reduce(blockDim.x / 32 * CLUSTER * VECTORS) {}

    __device__ __forceinline__ static int rank() { return decltype(reduce)::rank(); }

    // By whole warps: vector v of this thread's, `of(row)` its numbers.
    template <typename Of>
    __device__ __forceinline__ void publish(const RowShare& s, int v, const Of& of) {
        float terms[ROWS] = {};
        if (s.has(v)) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) terms[row] = first_term(of(row));
        }
        __syncwarp();
        reduce.gather();
#if SUBTRACT_MEAN
        reduce.publish(
            s.chunk(v), s.elements(s.chunk(v)), terms, [&](int row, float from, float& first, float& second) {
                if (s.has(v)) moments(of(row), from, first, second);
            });
#else
        reduce.publish(s.chunk(v), terms);
#endif
    }

    // By whole warps, when all of their vectors are published.
    __device__ __forceinline__ void join(const Params& p, const RowShare& s, Norm (&norms)[ROWS]) {
        reduce.join();
        const auto scale_of = [&](float squares) { return rsqrtf(squares / p.elements + p.eps); };
        float scales[ROWS];
#if SUBTRACT_MEAN
        float means[ROWS];
        reduce.totals(s.chunks(), p.elements, [&](int chunk) { return s.elements(chunk); }, scale_of, means, scales);
#else
        reduce.totals(s.chunks(), scale_of, scales);
#endif
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            norms[row].scale = scales[row];
#if SUBTRACT_MEAN
            norms[row].mean = means[row];
#endif
        }
    }

    // Stores the rows from `first` on that there are in fp8, and their scales. By whole warps, after `join`.
    __device__ __forceinline__ void store_quantized(
        const Params& p, const RowShare& s, const uint4 (&normed)[VECTORS][ROWS], u32 first) {
        float scales[ROWS];
#if QUANT == 2
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float terms[ROWS] = {};
            if (s.has(v)) {
#pragma unroll
                for (int row = 0; row < ROWS; ++row) terms[row] = largest_of(Numbers(normed[v][row]));
            }
            __syncwarp();
            reduce.publish_largest(s.chunk(v), terms);
        }
        reduce.join();
        reduce.largest(s.chunks(), [&](float largest) { return Quant::of(largest, p.smallest); }, scales);
#else
        const float given = __uint_as_float(weft::load_relaxed(p.scales));
#pragma unroll
        for (int row = 0; row < ROWS; ++row) scales[row] = given;
#endif
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (first + row >= p.rows) continue;
            if (QUANT == 2 && s.at(0) == 0) weft::store_word(p.scales + first + row, __float_as_uint(scales[row]));
            const Quant quant(scales[row]);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (s.has(v)) quant.store(quantized_vector(p, first + row, s.at(v)), normed[v][row]);
            }
        }
    }

private:
    // The sum of a lane's squares, or the mean of its numbers.
    __device__ __forceinline__ static float first_term(const Numbers& numbers) {
        float sum = 0, squares = 0;
        moments(numbers, 0, sum, squares);
        return SUBTRACT_MEAN ? sum / ELEMENTS : squares;
    }
};

}  // namespace
