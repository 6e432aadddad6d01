// Blackwell's PTX: tensor memory, and products of one block (cta_group::1) that add up there.
//
// Tensor memory has 128 lanes of 512 columns of 32 bits. An address has the lane in its upper half, the column in its
// lower one.

#pragma once

#include "ptx/barriers.cuh"

namespace weft {

// By a whole warp: so many columns, a power of two of at least 32, whose address is written to shared memory. They must
// be given back before the block ends.
template <int COLUMNS>
__device__ __forceinline__ void allocate_tensor_memory(u32* address) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(address)),
                 "n"(COLUMNS)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

template <int COLUMNS>
__device__ __forceinline__ void free_tensor_memory(u32 address) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS) : "memory");
}

// Around what orders threads: accesses to tensor memory before, and those after.
__device__ __forceinline__ void order_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void order_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// By one thread: D [M, N] in tensor memory, row i in lane i and column j in column j, += A [M, 16] @ B [16, N] in shared
// memory; = if `add` is 0.
__device__ __forceinline__ void multiply_in_tensor_memory(u32 d, u64 a, u64 b, u32 instruction, int add) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
        " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d), "l"(a), "l"(b), "r"(instruction), "r"(add)
        : "memory");
}

// One arrival at the barrier when all products of this thread are done so far; at those of both blocks of a cluster.
__device__ __forceinline__ void arrive_after_products(u64* barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                     shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void arrive_after_products_at_both(u64* barrier) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            shared_address(barrier)),
        "h"(static_cast<u16>(3))
        : "memory");
}

// By a whole warp: 16 columns of the 32 lanes of tensor memory that its place in its warpgroup gives it, lane i of them
// to lane i of the warp. They are there after `tensor_loads_done`.
__device__ __forceinline__ void load_from_tensor_memory(u32 address, float* v) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "[%16];"
        : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7]), "=f"(v[8]),
          "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]), "=f"(v[14]), "=f"(v[15])
        : "r"(address)
        : "memory");
}

// Nothing that uses the numbers is moved before it.
template <int N>
__device__ __forceinline__ void tensor_loads_done(float (&v)[N]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i]));
}

}  // namespace weft
