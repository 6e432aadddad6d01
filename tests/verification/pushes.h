// What kernels that push have in place of sync.cuh, barriers.cuh, dependent.cuh, float8.cuh, mma.cuh, numbers.cuh and
// reduce.cuh: templates and one-liners. What depends on a kernel's defines is in pushes.cpp, the rest in
// pushes_simulator.cpp, which is compiled once for all of them. They give up the processor wherever a kernel polls, stores
// to a peer or meets a barrier. What is stored is there at once, but for half of the zeros, with which slots are emptied,
// and after `vectors_come_late` half of all vectors: they come when the thread has a fence, or another one of its block with
// a barrier before it, or when the kernel ends. A fence_system merely orders: they come when a thread that knows of them
// posts a flag after it. A thread knows of its own, of its block's, and of those that were ordered before a count it adds to.

#ifndef PUSHES_H  // it lies in several places (fibers.py)
#define PUSHES_H

#include "fibers.h"

struct uint4 {
    unsigned x, y, z, w;
};

struct uint2 {
    unsigned x, y;
};

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static unsigned __float_as_uint(float x) { return weft::as_bits(x); }
static float __uint_as_float(unsigned bits) { return weft::as_float(bits); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selected) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> (selected >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return chosen;
}

Meeting& warp();
void meet_warp();
// What each lane of the warp holds, by way of memory.
float* warp_lanes();

void __syncthreads();
bool __syncthreads_and(bool said);
inline void __syncwarp() { meet_warp(); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
static void __threadfence() {}
void __threadfence_system();
unsigned __ballot_sync(unsigned, bool said);
inline bool __all_sync(unsigned, bool said) { return __ballot_sync(~0u, said) == ~0u; }
float __shfl_sync(unsigned, float x, int from);
inline float __shfl_xor_sync(unsigned, float x, int mask) { return __shfl_sync(0, x, running->thread % 32 ^ mask); }
unsigned __reduce_max_sync(unsigned, unsigned word);
long long __shfl_sync(unsigned, long long x, int from);
inline long long __shfl_xor_sync(unsigned, long long x, int mask) {
    return __shfl_sync(0, x, running->thread % 32 ^ mask);
}
inline long long __shfl_up_sync(unsigned, long long x, int by) {
    const int lane = running->thread % 32;
    return __shfl_sync(0, x, lane < by ? lane : lane - by);
}
unsigned __match_any_sync(unsigned, int word);
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

unsigned atomicAdd(unsigned* place, unsigned more);
static void atomicMax(unsigned* place, unsigned value) { *place = max(*place, value); }

namespace weft {

void store_payload(uint4* slot, uint4 v);
uint4 load_vector(const uint4* place);
inline uint4 load_payload(const uint4* slot) { return load_vector(slot); }
inline void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    if (wanted) v = load_vector(slot);
}
void store_vector(uint4* place, uint4 v);
inline void store_vector_once(uint4* place, uint4 v) { store_vector(place, v); }
void store_vector(uint2* place, uint2 v);
static void store_word(u32* place, u32 value) {
    *place = value;
    ++stores;
}
static u32 load_relaxed(const u32* word) { return *word; }
u32 load_payload_word(const u32* word);
void store_payload_word(u32* word, u32 value);
void reset_payload_word(u32* word);

template <typename T>
static T load_once(const T* place) {
    return *place;
}

static void post_flag(u32* word, u32 value) {
    __threadfence_system();
    store_word(word, value);
}
void post_after_fence(u32* word, u32 value);
void fence_system();
static void let_next_begin() {}
void wait_for_previous();
inline void begin_after_previous() { wait_for_previous(); }

void barrier_sync(int id, u32 threads);
void barrier_arrive(int id, u32 threads);
void sync_cluster(u32 blocks);

struct float16 : bfloat16 {};  // compiled, and not run

template <bool IS_E5M2>
u32 float8_bits(float number);
template <bool IS_E5M2>
static u32 pack_float8(const float (&in)[4]) {
    u32 word = 0;
    for (int i = 0; i < 4; ++i) word |= float8_bits<IS_E5M2>(in[i]) << 8 * i;
    return word;
}

namespace reduce {
struct sum {
    static float combine(float a, float b) { return a + b; }
    static float finish(float total, int) { return total; }
};
struct avg : sum {
    static float finish(float total, int ranks) { return total / ranks; }
};
struct max {
    static float combine(float a, float b) { return std::isnan(a) || a > b ? a : b; }
    static float finish(float total, int) { return total; }
};
struct min {
    static float combine(float a, float b) { return std::isnan(a) || a < b ? a : b; }
    static float finish(float total, int) { return total; }
};
}  // namespace reduce

}  // namespace weft

#endif
