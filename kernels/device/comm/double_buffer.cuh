// One use of a buffer of a workspace, by a whole kernel (symm_mem/workspace.py is the protocol).

#pragma once

#include "ptx/sync.cuh"

namespace weft {

// Where the words of a buffer are (symm_mem/workspace.py), and how far ranks lie apart.
struct BufferWords {
    int epoch, left;  // indices of EPOCH[buffer] and LEFT[buffer]
    int done, flags, flags_per_rank;  // of the first done word and the first flag
    int world_size;
    int pace;  // of the first of two words: the clock of rate_limiter.cuh
    u64 span;  // bytes from this rank's copy of an address to the next rank's
};

template <typename T>
__device__ __forceinline__ T* on_rank(T* mine, const WaitParams& watch, const BufferWords& buffer, int rank) {
    const u64 there = static_cast<u64>(static_cast<long long>(rank - watch.rank)) * buffer.span;
    return reinterpret_cast<T*>(reinterpret_cast<u64>(mine) + there);
}

// Whether nobody reads any more, at any peer, what use `use` will overwrite there: by all lanes of a warp. Not if a wait
// has expired before: then what would be sent may be worth nothing. Who sends nothing sets no flags.
__device__ __forceinline__ bool may_send(const WaitParams& watch, const BufferWords& buffer, u32 use) {
    const int lane = threadIdx.x % 32;
    bool free = !is_broken(watch);
    if (free && lane < buffer.world_size && lane != watch.rank) {
        free = wait_flag(watch, lane, buffer.done + lane, use - 1, WAIT_FREE);
    }
    const bool all = __all_sync(~0u, free);
    __syncwarp();  // each lane has looked at one peer, and stores to all
    return all;
}

// By one thread of every block, when that block reads nothing of the buffer any more, and has emptied what it took where
// data announces itself, though it may still store results: the last one ends the use. The first fence covers the zeros.
__device__ __forceinline__ void leave(const WaitParams& watch, const BufferWords& buffer, u32 use) {
    __threadfence();
    if (atomicAdd(watch.words + buffer.left, 1) != gridDim.x - 1) return;
    __threadfence();
    watch.words[buffer.left] = 0;
    watch.words[buffer.epoch] = use;
    // One fence for all of them: each waits until the store before it has come to its peer.
    __threadfence_system();
    for (int rank = 0; rank < buffer.world_size; ++rank) {
        post_behind_fence(on_rank(watch.words, watch, buffer, rank) + buffer.done + watch.rank, use);
    }
}

}  // namespace weft
