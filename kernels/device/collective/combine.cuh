// Rows of experts' outputs, put together while they are loaded in place of an input: row t is the sum of
// weights[t][j] * y[slots[t][j]] over its CHOICES j, in their order, and with SHARED_EXPERT of shared[t], in float32,
// rounded once. A slot that is no row of y adds nothing. Included after comm/ll_exchange.cuh.
//
//   CHOICES        of a row; 0, or not defined: there is an input
//   WIDE_CHOICES   1: their weights are float32, else of the dtype of y
//   SHARED_EXPERT  1: there is a row of the shared expert for each token

#pragma once

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
    static constexpr int MOST = CHOICES < 8 ? CHOICES : 8;  // choices whose vectors are in flight at once

    // Some of a row's choices, and a vector of each.
    struct Chosen {
        u64 begin;
        u32 slot[MOST];
        uint4 in[MOST];
    };

    // Those from the `from`-th on.
    __device__ __forceinline__ void find(Chosen& c, u32 row, int from = 0) const {
        c.begin = (static_cast<u64>(first) + row) * CHOICES + from;
#pragma unroll
        for (int j = 0; j < MOST; ++j) c.slot[j] = from + j < CHOICES ? slots[c.begin + j] : rows;
    }

    __device__ __forceinline__ void load(Chosen& c, u32 at) const {
#pragma unroll
        for (int j = 0; j < MOST; ++j) {
            c.in[j] = make_uint4(0, 0, 0, 0);
            if (c.slot[j] < rows) c.in[j] = load_vector(y + static_cast<u64>(c.slot[j]) * vectors + at);
        }
    }

    __device__ __forceinline__ void add(Numbers& total, const Chosen& c) const {
#pragma unroll
        for (int j = 0; j < MOST; ++j) {
            const float weight = c.slot[j] < rows ? weight_of(c.begin + j) : 0;
            const Numbers numbers(c.in[j]);
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) total.of[i] += weight * numbers.of[i];
        }
    }

    // Vector `at` of a row.
    __device__ __forceinline__ uint4 load(u32 row, u32 at) const {
        Numbers total(make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int from = 0; from < CHOICES; from += MOST) {
            Chosen chosen;
            find(chosen, row, from);
            load(chosen, at);
            add(total, chosen);
        }
#if SHARED_EXPERT
        const Numbers more(load_vector(shared + (static_cast<u64>(first) + row) * vectors + at));
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
