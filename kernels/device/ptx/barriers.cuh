// Barriers in shared memory, and clusters of blocks, which reach each other's.
//
// A barrier's phase ends with `count` arrivals and all expected bytes; phases have parity 0, 1, 0 ... Nothing here
// waits for another rank: what threads of this cluster wait for on other ranks is bounded in sync.cuh.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The block's only T in shared memory: a kernel that asks twice gets the same one.
template <typename T>
__device__ __forceinline__ T& of_block() {
    __shared__ T memory;
    return memory;
}

__device__ __forceinline__ void init_barrier(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// After init_barrier, before a copy or another thread may use the barrier (a __syncthreads follows).
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that expects `bytes` of copies.
__device__ __forceinline__ void arrive_expecting(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Until the phase of this parity is over.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (done == 0);
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of both blocks have arrived, and see what the others wrote before.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Its arrive and its wait, for blocks that must only have started: nothing is ordered. By whole warps.
__device__ __forceinline__ void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Writes a number to `place` of block `block` of the cluster, and counts its bytes at `barrier` there.
__device__ __forceinline__ void tell(float* place, u64* barrier, int block, float value) {
    asm volatile(
        "{\n .reg .b32 there, arrived;\n mapa.shared::cluster.u32 there, %0, %2;\n"
        " mapa.shared::cluster.u32 arrived, %1, %2;\n"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [arrived];\n}" ::"r"(
            shared_address(place)),
        "r"(shared_address(barrier)), "r"(block), "f"(value)
        : "memory");
}

// The word at the same place of block `block` of the cluster, which wrote it before a sync_cluster.
__device__ __forceinline__ int load_from(const int* place, u32 block) {
    int value;
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %1, %2;\n ld.shared::cluster.s32 %0, [there];\n}"
        : "=r"(value)
        : "r"(shared_address(place)), "r"(block)
        : "memory");
    return value;
}

// Arrives at the same barrier of block `block` of the cluster.
__device__ __forceinline__ void arrive_at(u64* barrier, u32 block) {
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

}  // namespace weft
