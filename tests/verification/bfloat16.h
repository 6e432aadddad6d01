// Products of warpgroups of bfloat16 operands, as plain arithmetic. For matmuls.cpp.

#pragma once

#include "sums.h"

namespace weft {

// 16 numbers of a row or a column, which one instruction multiplies and adds.
static Floats sixteen(const u16* first) {
    u16 __attribute__((vector_size(32))) bits;
    std::memcpy(&bits, first, sizeof bits);
    return reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
}

// Two columns side by side.
struct Columns {
    Floats first, second;

    template <int N_CONTIGUOUS>
    static Columns at(const u16* bs, int column) {
        if (!N_CONTIGUOUS) return {sixteen(bs + 64 * column), sixteen(bs + 64 * (column + 1))};
        const u16* from = bs + column / 64 * 2048 + column % 64;
        Words pairs;
        for (int k = 0; k < 16; ++k) std::memcpy(reinterpret_cast<char*>(&pairs) + 4 * k, from + 64 * k, 4);
        return {reinterpret_cast<Floats>(pairs << 16), reinterpret_cast<Floats>(pairs & 0xffff0000u)};
    }
};

template <int N>
struct Wgmma {
    template <int N_CONTIGUOUS>
    static void run(float (&d)[N / 2], u64 a, u64 b, int add) {
        const u16 *as = reinterpret_cast<const u16*>(a << 4), *bs = reinterpret_cast<const u16*>(b << 4);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        const Floats x = sixteen(as + 64 * row), below = sixteen(as + 64 * (row + 8));
        for (int i = 0; i < N / 2; i += 4) {
            const Columns y = Columns::at<N_CONTIGUOUS>(bs, i * 2 + lane % 4 * 2);
            const Floats more = sums(x * y.first, x * y.second, below * y.first, below * y.second);
            for (int j = 0; j < 4; ++j) d[i + j] = (add ? d[i + j] : 0) + more[4 * j];
        }
    }
};

}  // namespace weft
