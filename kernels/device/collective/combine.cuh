// Rows of experts' outputs, put together while they are loaded in place of an input: row t is the sum of
// weights[t][j] * y[slots[t][j]] over its CHOICES j, in their order, and with SHARED_EXPERT of shared[t], in float32,
// rounded once. A slot that is no row of y adds nothing. Included after comm/ll_exchange.cuh.
//
//   CHOICES        of a row; 0: there is an input
//   WIDE_CHOICES   1: their weights are float32, else of the dtype of y
//   SHARED_EXPERT  1: there is a row of the shared expert for each token

#pragma once

#ifndef CHOICES
#define CHOICES 0
#endif
#ifndef WIDE_CHOICES
#define WIDE_CHOICES 0
#endif
#ifndef SHARED_EXPERT
#define SHARED_EXPERT 0
#endif

namespace weft {

// The host's twin is `CombineSource` in combine.py.
struct Combine {
    const uint4* y;
    const u32* slots;
    const void* weights;
    const uint4* shared;
    u32 rows;  // of y
    u32 tokens;
    u32 first;  // the token of row 0
    u32 vectors;  // of a row

#if CHOICES
    // Vector `at` of a row.
    __device__ __forceinline__ uint4 load(u32 row, u32 at) const {
        constexpr int MOST = CHOICES < 8 ? CHOICES : 8;  // whose vectors are in flight at once
        const u64 token = first + row, begin = token * CHOICES;
        Numbers total(make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int from = 0; from < CHOICES; from += MOST) {
            u32 slot[MOST];
            float weight[MOST];
            uint4 in[MOST];
#pragma unroll
            for (int j = 0; j < MOST; ++j) {
                const bool there = from + j < CHOICES;
                slot[j] = there ? slots[begin + from + j] : rows;
                weight[j] = there ? weight_of(begin + from + j) : 0;
            }
#pragma unroll
            for (int j = 0; j < MOST; ++j) {
                in[j] = make_uint4(0, 0, 0, 0);
                if (slot[j] < rows) {
                    in[j] = load_vector(y + static_cast<u64>(slot[j]) * vectors + at);
                } else {
                    weight[j] = 0;
                }
            }
#pragma unroll
            for (int j = 0; j < MOST; ++j) {
                const Numbers numbers(in[j]);
#pragma unroll
                for (int i = 0; i < ELEMENTS; ++i) total.of[i] += weight[j] * numbers.of[i];
            }
        }
#if SHARED_EXPERT
        const Numbers more(load_vector(shared + token * vectors + at));
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) total.of[i] += more.of[i];
#endif
        return total.rounded();
    }

    // Vector `at` of all rows, one after the other; zeros past their end.
    __device__ __forceinline__ uint4 load(u32 at) const {
        const u32 row = at / vectors;
        return row < tokens ? load(row, at - row * vectors) : make_uint4(0, 0, 0, 0);
    }

private:
    __device__ __forceinline__ float weight_of(u64 choice) const {
#if WIDE_CHOICES
        return static_cast<const float*>(weights)[choice];
#else
        float pair[Number::PER_WORD];
        Number::unpack(static_cast<const Number::Storage*>(weights)[choice], pair);
        return pair[0];
#endif
    }
#endif
};

}  // namespace weft
