// Several uses in one launch. No kernel ends between them, so a rank is told when slots are empty: a warp of each block
// that does nothing else, CreditWarp, waits until all threads have emptied those of use e, and then writes e to
// EMPTIED[b][r] of every peer: release, system scope. On the peers the same warp waits for that before its block sends for
// e + 2. When it begins, it says that all before this launch is empty; and it does not end before the peers have emptied
// all but the last use, which is what the next launch must know, whatever its blocks and threads do with the slots.

#include "comm/ll_exchange.cuh"

namespace weft {

// The last warp of a block whose other threads, the workers, make several uses of its slots. Its lane i serves the peers
// i, i + 32, ...
struct CreditWarp {
    const ExchangeSlots& s;
    static constexpr int MAY_SEND = 1, EMPTY = 2;  // barriers of the block

    // Of the workers, before they send for the next use. False: it has waited in vain.
    __device__ __forceinline__ bool may_send() const {
        barrier_sync(MAY_SEND, blockDim.x);
        return !is_broken(s.watch);
    }

    // Of the workers, when they have emptied the slots of a use, but not of the last one.
    __device__ __forceinline__ void emptied() const { barrier_arrive(EMPTY, blockDim.x); }

    // Of the warp itself, for so many uses, 2 or more, of which `use` is the first.
    __device__ __forceinline__ void serve(u32 use, u32 uses) const {
        say(use - 1);
        for (; uses > 1; ++use, --uses) {
            hear(use - 1);
            barrier_arrive(MAY_SEND, blockDim.x);
            barrier_sync(EMPTY, blockDim.x);
            say(use);
        }
        hear(use - 1);
    }

private:
    __device__ __forceinline__ u32 word(int rank) const { return s.emptied + blockIdx.x * WORLD_SIZE + rank; }

    // Nothing once a wait has expired: then slots are not known to be empty.
    __device__ __forceinline__ void say(u32 use) const {
        __threadfence_system();
        if (is_broken(s.watch)) return;
        for (int peer = threadIdx.x % 32; peer < WORLD_SIZE; peer += 32) {
            if (peer == RANK) continue;
            char* words = reinterpret_cast<char*>(s.watch.words) + static_cast<long long>(s.span) * (peer - RANK);
            post_behind_fence(reinterpret_cast<u32*>(words) + word(RANK), use);
        }
    }

    __device__ __forceinline__ void hear(u32 use) const {
        for (int peer = threadIdx.x % 32; peer < WORLD_SIZE; peer += 32) {
            if (peer != RANK) wait_flag(s.watch, peer, word(peer), use, WAIT_FREE);
        }
        __syncwarp();
    }
};

}  // namespace weft
