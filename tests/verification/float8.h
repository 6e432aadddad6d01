// What kernels of fp8 operands use besides (gemm/sm90/scales.cuh), as plain arithmetic. For matmuls.cpp.

#pragma once

#include "sums.h"

#include <cmath>

struct float3 {
    float x, y, z;
};
static float3 make_float3(float x, float y, float z) { return {x, y, z}; }

namespace weft {

// Of the bits of e4m3 or e5m2; they are numbers.
static float as_float8(u8 bits, bool e4m3) {
    const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, exponent = (bits & 127) >> mantissa_bits;
    const float mantissa = float(bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits);
    const float value = std::ldexp(mantissa + (exponent > 0), std::max(exponent, 1) - bias);
    return bits & 128 ? -value : value;
}

struct Float8Table {
    float values[256];
    explicit Float8Table(bool e4m3) {
        for (int bits = 0; bits < 256; ++bits) values[bits] = as_float8(bits, e4m3);
    }
    float operator[](u8 bits) const { return values[bits]; }
};
static const Float8Table OF_A(FP8_TYPES[1] == '4'), OF_B(FP8_TYPES[6] == '4');

// 32 numbers of a row or a column, which one instruction multiplies and adds.
struct ThirtyTwo {
    Floats numbers[2];

    ThirtyTwo(const Float8Table& table, const u8* bits) {
        for (int k = 0; k < 32; ++k) numbers[k / 16][k % 16] = table[bits[k]];
    }
    Floats operator*(const ThirtyTwo& other) const {
        return numbers[0] * other.numbers[0] + numbers[1] * other.numbers[1];
    }
};

template <int N>
struct Wgmma {
    template <int N_CONTIGUOUS>
    static void run(float (&d)[N / 2], u64 a, u64 b, int add) {
        const u8 *as = reinterpret_cast<const u8*>(a << 4), *bs = reinterpret_cast<const u8*>(b << 4);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        const ThirtyTwo x(OF_A, as + 128 * row), below(OF_A, as + 128 * (row + 8));
        for (int i = 0; i < N / 2; i += 4) {
            const u8* columns = bs + 128 * (i * 2 + lane % 4 * 2);
            const ThirtyTwo y(OF_B, columns), next(OF_B, columns + 128);
            const Floats more = sums(x * y, x * next, below * y, below * next);
            for (int j = 0; j < 4; ++j) d[i + j] = (add ? d[i + j] : 0) + more[4 * j];
        }
    }
};

}  // namespace weft
