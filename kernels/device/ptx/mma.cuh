// mma.sync of one warp, and loads of what is read once. A file of its own: CPU tests have a stand-in for it.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

#ifndef PRODUCT_TYPE
#error "PRODUCT_TYPE: \"bf16\" or \"f16\", the operands' type as PTX calls it"
#endif

// d [16, 8] += a [16, 16] @ b [16, 8], by all lanes of a warp. Lane 4 g + q has of d, in rows g and g + 8 (the second
// two), columns 2 q and 2 q + 1; of a, in words of two, columns 2 q of row g and of row g + 8, then 8 columns to the
// right of both; of b, in words of two, rows 2 q and 2 q + 8 of column g.
__device__ __forceinline__ void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." PRODUCT_TYPE "." PRODUCT_TYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Numbers that no block reads twice.
__device__ __forceinline__ uint4 load_once(const uint4* place) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(place));
    return v;
}

__device__ __forceinline__ uint2 load_once(const uint2* place) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(place));
    return v;
}

}  // namespace weft
