// Credits: several epochs of a block's slots in one launch (ll_exchange.cuh), between which no kernel ends.
//
// Who writes: warp CreditWarp of block b on rank r, EMPTIED[b][r] = e at every peer, when all threads have reset the
// slots of epoch e; one system fence, then relaxed stores. Who waits: the same warp on the peers, acquire, system
// scope, before its block sends for e + 2, and at its end for all but the last epoch. Graph-safe.
// docs/protocol.md#credits has the proof.

#include "comm/ll_exchange.cuh"

namespace weft {

// The last warp of a block whose other threads, the workers, use its slots for several epochs. Lane i serves the peers
// i, i + 32, ...
struct CreditWarp {
    const ExchangeSlots& s;
    u32 senders, receivers;  // the threads of the warp and of those who send, of those who receive: all, or a part each
    static constexpr int MAY_SEND = 1, EMPTY = 2;  // barriers of the block

    // By who sends, before they do so for the next epoch. False: a wait has expired.
    __device__ __forceinline__ bool may_send() const {
        barrier_sync(MAY_SEND, senders);
        return !is_broken(s.watch);
    }

    // By who receives, when they have reset the slots of an epoch, but not of the last one.
    __device__ __forceinline__ void emptied() const { barrier_arrive(EMPTY, receivers); }

    // The same where others send: only these keep the warp and who receives at one epoch.
    __device__ __forceinline__ void all_emptied() const { barrier_sync(EMPTY, receivers); }

    // By the warp itself, for `epochs` epochs, 2 or more, of which `epoch` is the first.
    __device__ __forceinline__ void serve(u32 epoch, u32 epochs) const {
        say(epoch - 1);
        for (; epochs > 1; ++epoch, --epochs) {
            hear(epoch - 1);
            barrier_sync(MAY_SEND, senders);
            barrier_sync(EMPTY, receivers);
            say(epoch);
        }
        hear(epoch - 1);
    }

private:
    __device__ __forceinline__ u32 word(int rank) const { return s.emptied + blockIdx.x * WORLD_SIZE + rank; }

    // Posts nothing once a wait has expired: slots are not known to be empty then.
    __device__ __forceinline__ void say(u32 epoch) const {
        __threadfence_system();
        if (is_broken(s.watch)) return;
        for (int peer = threadIdx.x % 32; peer < WORLD_SIZE; peer += 32) {
            if (peer == RANK) continue;
            char* words = reinterpret_cast<char*>(s.watch.words) + static_cast<long long>(s.span) * (peer - RANK);
            post_after_fence(reinterpret_cast<u32*>(words) + word(RANK), epoch);
        }
    }

    __device__ __forceinline__ void hear(u32 epoch) const {
        for (int peer = threadIdx.x % 32; peer < WORLD_SIZE; peer += 32) {
            if (peer != RANK) wait_flag(s.watch, peer, word(peer), epoch, WAIT_FREE);
        }
        __syncwarp();
    }
};

}  // namespace weft
