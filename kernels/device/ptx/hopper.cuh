// Hopper's PTX: counts in shared memory, TMA copies, wgmma.
//
// Nothing here waits for another rank. Waits in shared memory end when this block's own copies and threads have made
// progress; what these wait for on other ranks is bounded in sync.cuh.

#pragma once

#include "ptx/barriers.cuh"

namespace weft {

using u8 = unsigned char;

constexpr u16 BOTH_BLOCKS = 3;  // of a cluster of two, a bit for each

// A tensor map (CUtensorMap), encoded on the host, passed by value in a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// True in one lane of a converged warp, always the same. (It tells the assembler that one thread issues what follows:
// else it puts a loop over the lanes around each TMA copy.)
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// ---- counts in shared memory, which one warp sets and another one of the block waits for: they only grow. (A count
// that is only zero or not may have several writers.) Release and acquire, block scope.

#ifdef RACECHECK  // which takes a release and an acquire, or relaxed accesses, for a race, but not atomic operations
#define SET_COUNT "red.release.cta.shared.max.u32 [%0], %1;"
#define READ_COUNT "atom.acquire.cta.shared.max.u32 %0, [%1], 0;"
#define STORE_SLOT ".reg .b32 old;\n atom.relaxed.cluster.shared::cluster.exch.b32 old, [there], %2;"
#define READ_SLOT "atom.relaxed.cluster.shared::cta.or.b32 %0, [%1], 0;"
#else
#define SET_COUNT "st.release.cta.shared.u32 [%0], %1;"
#define READ_COUNT "ld.acquire.cta.shared.u32 %0, [%1];"
#define STORE_SLOT "st.relaxed.cluster.shared::cluster.u32 [there], %2;"
#define READ_SLOT "ld.relaxed.cluster.shared::cta.u32 %0, [%1];"
#endif

__device__ __forceinline__ void set_count(u32* count, u32 value) {
    asm volatile(SET_COUNT ::"r"(shared_address(count)), "r"(value) : "memory");
}

__device__ __forceinline__ u32 read_count(const u32* count) {
    u32 seen;
    asm volatile(READ_COUNT : "=r"(seen) : "r"(shared_address(count)) : "memory");
    return seen;
}

// Waits until it is at least `needed`; returns what it is then. With pauses: a warp that only polls takes power, which
// limits products.
__device__ __forceinline__ u32 wait_count(const u32* count, u32 needed) {
    for (;; __nanosleep(40)) {
        const u32 seen = read_count(count);
        if (seen >= needed) return seen;
    }
}

// A word at the same place of block `block` of the cluster. It orders nothing.
__device__ __forceinline__ void store_slot(u32* slot, u32 block, u32 value) {
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n " STORE_SLOT "\n}"
        ::"r"(shared_address(slot)), "r"(block), "r"(value)
        : "memory");
}

// Waits until the lowest bit of the word is not `parity`; returns the word.
__device__ __forceinline__ u32 wait_slot(const u32* slot, u32 parity) {
    for (;;) {
        u32 seen;
        asm volatile(READ_SLOT : "=r"(seen) : "r"(shared_address(slot)) : "memory");
        if ((seen & 1) != parity) return seen;
    }
}

// ---- copies

// This thread's ordinary accesses to any memory before, bulk copies after (and the other way round).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// To the same place in both blocks of the cluster, counted at the same barrier of each.
__device__ __forceinline__ void tma_load_cluster(const TensorMap& map, void* to, u64* barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(BOTH_BLOCKS)
        : "memory");
}

__device__ __forceinline__ void tma_load_cluster(
    const TensorMap& map, void* to, u64* barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(BOTH_BLOCKS)
        : "memory");
}

__device__ __forceinline__ void tma_load_cluster(
    const TensorMap& map, void* to, u64* barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "h"(BOTH_BLOCKS)
        : "memory");
}

__device__ __forceinline__ void tma_load(const TensorMap& map, void* to, u64* barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_load(
    const TensorMap& map, void* to, u64* barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// A box of shared memory, where a bulk copy has written it, to the tensor; what lies outside of that is left out. By
// one thread, for which `tma_stores_have_read` then waits. What is written is there when the grid is over.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the stores of this thread have read their boxes, which may then be written again.
__device__ __forceinline__ void tma_stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// All threads of a compute warpgroup have arrived, and see what the others wrote before.
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// The same, and whether the predicate holds for all of them.
__device__ __forceinline__ bool all_of_warpgroup(int warpgroup, bool mine) {
    u32 all;
    asm volatile(
        "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.and.pred q, %2, 128, p;\n selp.u32 %0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(static_cast<u32>(mine)), "r"(warpgroup + 1)
        : "memory");
    return all != 0;
}

// ---- registers per thread of a warpgroup

template <int N>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- wgmma: D [64, N] += A [64, 16] @ B [16, N], of fp8 A [64, 32] @ B [32, N]; A and B in shared memory, D in
// registers

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// An operand's smem descriptor, for rows of 128 bytes with the 128-byte swizzle (as TMA writes them). K contiguous:
// rows are rows of A or columns of B, `stride` = 1024 bytes between groups of 8; `leading` is not used. N contiguous:
// rows are single k, 64 columns each; `stride` = 1024 bytes between groups of 8 k, `leading` between groups of 64
// columns.
__device__ __forceinline__ u64 smem_descriptor(const void* at, u32 leading, u32 stride) {
    const u64 start = (shared_address(at) & 0x3ffff) >> 4;
    return start | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

template <int N>
struct Wgmma;

#define WEFT_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define WEFT_EIGHT(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define WEFT_SIXTEEN(i) WEFT_EIGHT(i), WEFT_EIGHT(i + 8)
#define WEFT_FORTY_EIGHT(i) WEFT_SIXTEEN(i), WEFT_SIXTEEN(i + 16), WEFT_SIXTEEN(i + 32)

#ifndef PRODUCT_TYPE
#error "PRODUCT_TYPE: \"bf16\" or \"f16\", the operands' type as PTX calls it"
#endif

#ifdef FP8_TYPES  // of A and B, "e4m3.e5m2" say; both have K contiguous, and an instruction has 32 of it
#define WEFT_OPERANDS "k32.f32." FP8_TYPES
#define WEFT_MAJOR(rows_at)
#else
#define WEFT_OPERANDS "k16.f32." PRODUCT_TYPE "." PRODUCT_TYPE
#define WEFT_MAJOR(rows_at) ", 0, " rows_at
#endif

// `list` names the N / 2 registers of D; a_at and so on, the operands after them. N_CONTIGUOUS: B lies as [K, N].
#define WEFT_PRODUCT(n, list, a_at, b_at, add_at, rows_at, ...) \
    template <> \
    struct Wgmma<n> { \
        template <int N_CONTIGUOUS> \
        static __device__ __forceinline__ void run(float (&d)[n / 2], u64 a, u64 b, int add) { \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " add_at ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #n WEFT_OPERANDS " {" list "}, " a_at \
                         ", " b_at ", p, 1, 1" WEFT_MAJOR(rows_at) ";\n}" \
                         : __VA_ARGS__ \
                         : "l"(a), "l"(b), "r"(add), "n"(N_CONTIGUOUS)); \
        } \
    };

#define WEFT_20 WEFT_TEN() WEFT_TEN(1)
#define WEFT_40 WEFT_20 WEFT_TEN(2) WEFT_TEN(3)
#define WEFT_60 WEFT_40 WEFT_TEN(4) WEFT_TEN(5)
#define WEFT_90 WEFT_60 WEFT_TEN(6) WEFT_TEN(7) WEFT_TEN(8)
#define WEFT_120 WEFT_90 WEFT_TEN(9) WEFT_TEN(10) WEFT_TEN(11)

WEFT_PRODUCT(64, WEFT_20 WEFT_TEN(2) "%30,%31", "%32", "%33", "%34", "%35", WEFT_SIXTEEN(0), WEFT_SIXTEEN(16))
WEFT_PRODUCT(96, WEFT_40 "%40,%41,%42,%43,%44,%45,%46,%47", "%48", "%49", "%50", "%51", WEFT_FORTY_EIGHT(0))
WEFT_PRODUCT(
    128, WEFT_60 "%60,%61,%62,%63", "%64", "%65", "%66", "%67", WEFT_FORTY_EIGHT(0), WEFT_SIXTEEN(48))
WEFT_PRODUCT(
    160, WEFT_60 WEFT_TEN(6) "%70,%71,%72,%73,%74,%75,%76,%77,%78,%79", "%80", "%81", "%82", "%83",
    WEFT_FORTY_EIGHT(0), WEFT_SIXTEEN(48), WEFT_SIXTEEN(64))
WEFT_PRODUCT(
    192, WEFT_90 "%90,%91,%92,%93,%94,%95", "%96", "%97", "%98", "%99", WEFT_FORTY_EIGHT(0), WEFT_FORTY_EIGHT(48))
WEFT_PRODUCT(
    224, WEFT_90 WEFT_TEN(9) WEFT_TEN(10) "%110,%111", "%112", "%113", "%114", "%115", WEFT_FORTY_EIGHT(0),
    WEFT_FORTY_EIGHT(48), WEFT_SIXTEEN(96))
WEFT_PRODUCT(
    256, WEFT_120 "%120,%121,%122,%123,%124,%125,%126,%127", "%128", "%129", "%130", "%131", WEFT_FORTY_EIGHT(0),
    WEFT_FORTY_EIGHT(48), WEFT_SIXTEEN(96), WEFT_SIXTEEN(112))

#undef WEFT_OPERANDS
#undef WEFT_MAJOR
#undef WEFT_TEN
#undef WEFT_EIGHT
#undef WEFT_SIXTEEN
#undef WEFT_FORTY_EIGHT
#undef WEFT_20
#undef WEFT_40
#undef WEFT_60
#undef WEFT_90
#undef WEFT_120

}  // namespace weft
