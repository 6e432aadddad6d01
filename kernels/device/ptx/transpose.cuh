// Exponentials, and 16-bit numbers that go to shared memory transposed.

#pragma once

#include "ptx/barriers.cuh"

namespace weft {

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// By a warp: four matrices of 8 x 8, of which lane 4 g + q has columns 2 q and 2 q + 1 of row g in a word of each.
// Column c of matrix i is stored to 16 bytes at `to` of lane 8 i + c.
__device__ __forceinline__ void store_transposed(void* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

}  // namespace weft
