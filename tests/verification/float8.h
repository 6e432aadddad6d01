// What kernels of fp8 operands use besides (gemm/scales.cuh), as plain arithmetic. For matmuls.cpp.

#pragma once

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

template <int N>
struct Wgmma {
    template <int N_CONTIGUOUS>
    static void run(float (&d)[N / 2], u64 a, u64 b, int add) {
        const u8 *as = reinterpret_cast<const u8*>(a << 4), *bs = reinterpret_cast<const u8*>(b << 4);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        for (int i = 0; i < N / 2; ++i) {
            const u8* x = as + 128 * (row + i / 2 % 2 * 8);
            const u8* y = bs + 128 * (i / 4 * 8 + lane % 4 * 2 + i % 2);
            float sum = add ? d[i] : 0;
            for (int k = 0; k < 32; ++k) sum += OF_A[x[k]] * OF_B[y[k]];
            d[i] = sum;
        }
    }
};

}  // namespace weft
