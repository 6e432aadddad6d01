// One epoch of a workspace's buffer, by a whole kernel.
//
// Who writes: every launch that ends epoch e, done(buffer)[rank] = e at every rank, after its last read; release,
// system scope. Who waits: may_send, for e - 1 of every peer before the first store; acquire, system scope. Graph-safe:
// the epoch is read from device memory. docs/protocol.md#workspace-protocol has the proof.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

// Where the words of a buffer are (symm_mem/layout.py), and the distance between ranks.
struct BufferWords {
    int epoch, left;  // indices of EPOCH[buffer] and LEFT[buffer]
    int done, flags, flags_per_rank;  // of the first done word and the first flag
    int world_size;
    int limiter_clock;  // of the first of two words: the clock of rate_limiter.cuh
    int drawn;  // of DRAWN[buffer]: a counter of steps (gemm/step_queue.cuh) or shares
    u64 span;  // bytes from this rank's copy of an address to the next rank's
};

template <typename T>
__device__ __forceinline__ T* on_rank(T* mine, const WaitParams& watch, const BufferWords& buffer, int rank) {
    const u64 there = static_cast<u64>(static_cast<long long>(rank - watch.rank)) * buffer.span;
    return reinterpret_cast<T*>(reinterpret_cast<u64>(mine) + there);
}

// Acquires every peer's buffer for epoch `epoch`, by all lanes of a warp. False if a wait has expired, also an earlier
// one: what would be sent may be invalid. Whoever sends nothing sets no flags.
__device__ __forceinline__ bool may_send(const WaitParams& watch, const BufferWords& buffer, u32 epoch) {
    const int lane = threadIdx.x % 32;
    bool free = !is_broken(watch);
    if (free && lane < buffer.world_size && lane != watch.rank) {
        free = wait_flag(watch, lane, buffer.done + lane, epoch - 1, WAIT_FREE);
    }
    const bool all = __all_sync(~0u, free);
    __syncwarp();  // each lane has acquired one peer's word, and stores to all peers
    return all;
}

// By one thread of every block, when the block reads nothing of the buffer any more and has reset its LL slots; it may
// still store results. The last block ends the epoch. The first fence covers the zeros.
__device__ __forceinline__ void leave(const WaitParams& watch, const BufferWords& buffer, u32 epoch) {
    __threadfence();
    if (atomicAdd(watch.words + buffer.left, 1) != gridDim.x - 1) return;
    __threadfence();
    watch.words[buffer.left] = 0;
    watch.words[buffer.drawn] = 0;
    watch.words[buffer.epoch] = epoch;
    // One fence for all: each waits until the stores before it have reached their peers.
    __threadfence_system();
    for (int rank = 0; rank < buffer.world_size; ++rank) {
        post_after_fence(on_rank(watch.words, watch, buffer, rank) + buffer.done + watch.rank, epoch);
    }
}

}  // namespace weft
