// How normed rows become fp8, as quant.py has it. For rows.cuh, after ll_exchange.cuh.
//
//   QUANT     1: by the scale that is given, 2: by one of each row, which is made of its largest number
//   SCALE_OP  what is done with a scale: 0 its reciprocal is multiplied with, 1 it is divided by, 2 it is multiplied with
//   E5M2      1: float8_e5m2, 0: float8_e4m3fn

#pragma once

#include "ptx/float8.cuh"

namespace {

constexpr int QUANT_WORDS = weft::ELEMENTS / 4;  // of a vector's numbers in fp8

// A row's scale, and a vector by it.
struct Quant {
    static constexpr float LARGEST = E5M2 ? 57344 : 448;
    float by;

    __device__ __forceinline__ explicit Quant(float scale) : by(SCALE_OP == 0 ? 1 / scale : scale) {}

    __device__ __forceinline__ void store(weft::u32* place, const uint4& normed) const {
        const weft::Numbers numbers(normed);
        weft::u32 words[QUANT_WORDS];
#pragma unroll
        for (int i = 0; i < QUANT_WORDS; ++i) {
            float scaled[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float number = numbers.of[4 * i + k];
                scaled[k] = SCALE_OP == 1 ? number / by : number * by;
            }
            words[i] = weft::pack_float8<E5M2>(scaled);
        }
        if constexpr (QUANT_WORDS == 2) {
            weft::store_vector(reinterpret_cast<uint2*>(place), uint2{words[0], words[1]});
        } else {
            weft::store_word(place, words[0]);
        }
    }

    // The scale of a row of that largest number; of a NaN it is one.
    __device__ __forceinline__ static float of(float largest, double smallest) {
#if SCALE_OP == 0
        return at_least(largest / LARGEST, static_cast<float>(smallest));
#elif SCALE_OP == 1
        return rounded(rounded(at_least(largest, static_cast<float>(smallest))) / LARGEST);
#else
        return static_cast<float>(1 / at_least(static_cast<double>(largest), smallest) * LARGEST);
#endif
    }

private:
    template <typename T>
    __device__ __forceinline__ static T at_least(T number, T smallest) {
        return number < smallest ? smallest : number;
    }

    // To the dtype of the rows.
    __device__ __forceinline__ static float rounded(float number) {
        float pair[2] = {number, number};
        weft::Number::unpack(weft::Number::pack(pair), pair);
        return pair[0];
    }
};

}  // namespace
