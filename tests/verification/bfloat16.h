// Products of warpgroups of bfloat16 operands, as plain arithmetic. For matmuls.cpp.

#pragma once

#include <cstring>

namespace weft {

// 16 numbers of a row or a column, which one instruction multiplies and adds.
struct Sixteen {
    using Bits = u16 __attribute__((vector_size(32)));
    using Words = u32 __attribute__((vector_size(64)));
    using Floats = float __attribute__((vector_size(64)));
    Floats numbers;

    template <int STRIDE>
    static Sixteen at(const u16* first) {
        Bits bits;
        if (STRIDE == 1) {
            std::memcpy(&bits, first, sizeof bits);
        } else {
            for (int k = 0; k < 16; ++k) bits[k] = first[k * STRIDE];
        }
        return {reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16)};
    }
    float product(const Sixteen& other) const {
        Floats sums = numbers * other.numbers;
        for (int apart = 8; apart > 0; apart /= 2) {
            Words from = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            sums += __builtin_shuffle(sums, from ^ apart);
        }
        return sums[0];
    }
};

template <int N>
struct Wgmma {
    template <int N_CONTIGUOUS>
    static void run(float (&d)[N / 2], u64 a, u64 b, int add) {
        const u16 *as = reinterpret_cast<const u16*>(a << 4), *bs = reinterpret_cast<const u16*>(b << 4);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        const Sixteen x[] = {Sixteen::at<1>(as + 64 * row), Sixteen::at<1>(as + 64 * (row + 8))};
        for (int i = 0; i < N / 2; i += i % 2 ? 3 : 1) {
            const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const Sixteen y = N_CONTIGUOUS ? Sixteen::at<64>(bs + column / 64 * 2048 + column % 64)
                                           : Sixteen::at<1>(bs + 64 * column);
            for (int half = 0; half < 2; ++half) {
                float& sum = d[i + 2 * half];
                sum = (add ? sum : 0) + x[half].product(y);
            }
        }
    }
};

}  // namespace weft
