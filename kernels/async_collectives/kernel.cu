// The end of an all-gather or reduce-scatter whose parts copy engines have pushed: wait for them, and use them.
//
// gather: out[p] = part of rank p. sum_* and avg_*: out = the sum over ranks of their parts, in float32 and in rank
// order, or that divided by their number. A part of this rank itself is read where it lies, that of peer p in slot
// p - (p > rank) of this rank's buffer.
//
// Who writes: the peers' copy engines (comm/copy_engine.py), a part each and then the epoch into flag 0 of theirs. Who
// waits: a thread of each block for each peer's flag; acquire, system scope. The last block to be done counts the epoch
// and writes done(buffer)[rank] at every rank, after all blocks' reads; release, system scope. Blocks wait for nothing
// but the peers, so they may run one after the other.
//
// arrive: waits only. The parts are used where they lie, and `leave` of comm/acquire.cu ends the epoch.
//
// A wait that expires, here or earlier, breaks the group: then nothing is used, and the epoch ends. Graph-safe.
// docs/protocol.md#copy-engines-and-the-acquire-kernel has the proof.
//
// Defined: WORLD_SIZE, from 2 to 32.

#include "comm/abort_notice.cuh"
#include "math/numbers.cuh"
#include "math/reduce.cuh"

using weft::u32;
using weft::u64;

struct Params {
    weft::WaitParams watch;
    weft::BufferWords buffer;
    const uint4* own;
    const uint4* slots;  // of the buffer
    uint4* out;
    u64 vectors;  // of a part
};

constexpr int THREADS = 512;
constexpr int AT_ONCE = 4;  // vectors of a thread that are under way together

// The parts are there: for all threads of the block, which has at least 32.
__device__ __forceinline__ bool arrived(const Params& p, u32 epoch) {
    const int peer = threadIdx.x;
    bool there = true;
    if (peer < WORLD_SIZE && peer != p.watch.rank)
        there = weft::wait_flag(
            p.watch, peer, p.buffer.flags + peer * p.buffer.flags_per_rank, epoch, weft::WAIT_DATA);
    return __syncthreads_and(there && !weft::is_broken(p.watch));
}

// By all threads of a block that is done with the buffer.
__device__ __forceinline__ void leave(const Params& p, u32 epoch) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(p.watch.words + p.buffer.left, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x >= 32) return;
    const int peer = threadIdx.x;
    if (peer == 0) p.watch.words[p.buffer.left] = 0;
    if (peer == 0) p.watch.words[p.buffer.epoch] = epoch;
    if (peer < WORLD_SIZE) weft::end_epoch_at(p.watch, p.buffer, peer, epoch);
}

__device__ __forceinline__ const uint4* part(const Params& p, int rank) {
    return rank == p.watch.rank ? p.own : p.slots + static_cast<u64>(rank - (rank > p.watch.rank)) * p.vectors;
}

extern "C" __global__ void __launch_bounds__(32) arrive(const __grid_constant__ Params p) {
    arrived(p, p.watch.words[p.buffer.epoch] + 1);
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Params p) {
    const u32 epoch = p.watch.words[p.buffer.epoch] + 1;
    const bool there = arrived(p, epoch);
    const u64 step = static_cast<u64>(gridDim.x) * THREADS;
    for (int i = 0; there && i < WORLD_SIZE; ++i) {
        const int rank = (p.watch.rank + i) % WORLD_SIZE;
        const uint4* source = part(p, rank);
        uint4* target = p.out + rank * p.vectors;
        for (u64 at = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; at < p.vectors; at += step * AT_ONCE) {
            uint4 held[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (at + j * step < p.vectors) held[j] = weft::load_vector(source + at + j * step);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (at + j * step < p.vectors) weft::store_vector(target + at + j * step, held[j]);
        }
    }
    leave(p, epoch);
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& vector, float* to) {
    T::unpack(vector.x, to);
    T::unpack(vector.y, to + T::PER_WORD);
    T::unpack(vector.z, to + 2 * T::PER_WORD);
    T::unpack(vector.w, to + 3 * T::PER_WORD);
}

template <class T, class Reduce>
__device__ __forceinline__ void reduce_parts(const Params& p) {
    constexpr int COUNT = 4 * T::PER_WORD;
    const u32 epoch = p.watch.words[p.buffer.epoch] + 1;
    const bool there = arrived(p, epoch);
    const u64 step = static_cast<u64>(gridDim.x) * THREADS;
    for (u64 at = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; there && at < p.vectors; at += step) {
        float total[COUNT], next[COUNT];
        uint4 vector = weft::load_vector(part(p, 0) + at);
        unpack<T>(vector, total);
        for (int rank = 1; rank < WORLD_SIZE; ++rank) {
            vector = weft::load_vector(part(p, rank) + at);
            unpack<T>(vector, next);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) total[i] = Reduce::combine(total[i], next[i]);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) total[i] = Reduce::finish(total[i], WORLD_SIZE);
        vector.x = T::pack(total);
        vector.y = T::pack(total + T::PER_WORD);
        vector.z = T::pack(total + 2 * T::PER_WORD);
        vector.w = T::pack(total + 3 * T::PER_WORD);
        weft::store_vector(p.out + at, vector);
    }
    leave(p, epoch);
}

#define REDUCES(T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) sum_##T(const __grid_constant__ Params p) {   \
        reduce_parts<weft::T, weft::reduce::sum>(p);                                                    \
    }                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_##T(const __grid_constant__ Params p) {   \
        reduce_parts<weft::T, weft::reduce::avg>(p);                                                    \
    }

REDUCES(float32)
REDUCES(bfloat16)
REDUCES(float16)
