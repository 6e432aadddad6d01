// What tcgen05.mma is told of its operands. Plain arithmetic: it is tested on the CPU as it is.

#pragma once

namespace weft {

// An operand in shared memory, of rows of 128 bytes with the 128-byte swizzle (as TMA writes them). K contiguous: rows
// are rows of A or columns of B, `stride` = 1024 bytes between groups of 8; `leading` is not used. N contiguous: rows are
// single k, 64 columns each; `stride` = 1024 bytes between groups of 8 k, `leading` between groups of 64 columns.
__device__ __forceinline__ constexpr u64 operand_descriptor(u32 address, u32 leading, u32 stride) {
    constexpr u64 VERSION = 1ull << 46, SWIZZLE_128 = 2ull << 61;
    return (address & 0x3ffff) >> 4 | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 |
           VERSION | SWIZZLE_128;
}

// Of kind f16: products of two bfloat16 or two float16 in float32; A has K contiguous.
__device__ __forceinline__ constexpr u32 instruction_descriptor(int m, int n, bool is_bfloat16, bool n_contiguous) {
    const u32 type = is_bfloat16, to_float32 = 1;
    return to_float32 << 4 | type << 7 | type << 10 | static_cast<u32>(n_contiguous) << 16 | n / 8 << 17 | m / 16 << 24;
}

}  // namespace weft
