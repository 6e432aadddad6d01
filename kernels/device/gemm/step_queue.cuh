// The steps of a cluster, each a pair of rows by a column of tiles: drawn from a counter of the rank, in order, by
// whichever cluster is there. So no step waits for a cluster that has found no room on the GPU while other kernels run.
//
// Who writes: lane 0 of the loader of the cluster's first block, into a ring of slots in both blocks.
// Who waits: the loader, who issues products, and the compute warpgroups of both blocks, for their own next slot. Nothing here waits for
// another rank. The last block to leave the buffer sets the counter back (comm/double_buffer.cuh).

#pragma once

#include "gemm/gemm.cuh"

namespace weft {

// A slot holds 2 * step and a bit that flips with each lap: 1 in the first one, over slots that are 0 at first.
struct StepQueue {
    // The loader is at most STAGES stages ahead of their readers, each of another tile, and draws one more.
    static constexpr u32 SLOTS = 16;
    static_assert(SLOTS >= STAGES + 2 + TILES_AHEAD);

    u32* slots;
    u32 taken = 0;  // steps that this role has taken

    // The next step of the cluster; after the last one the number of steps, or more. By whole warps.
    __device__ __forceinline__ int next() {
        const u32 value = wait_slot(slots + taken % SLOTS, taken / SLOTS % 2);
        ++taken;
        return static_cast<int>(__shfl_sync(~0u, value, 0) >> 1);
    }
};

// The loader's, which draws for both blocks. It is warp 8, whose lane 0 draws.
struct StepSource {
    StepQueue queue;
    int block;  // of the two in the cluster
    u32 drawn = 0;

    __device__ __forceinline__ StepSource(const Shared& s, u32* slots) : queue{slots}, block(s.block) {}

    __device__ __forceinline__ bool draws() const { return block == 0 && threadIdx.x == 2 * GROUP; }

    // Early, so that the answer is there when `next` needs it; but not before others have drawn what they begin with,
    // for the last steps must not be drawn by clusters that have another one to compute first.
    __device__ __forceinline__ void ask(u32* counter) {
        if (draws()) drawn = atomicAdd(counter, 1);
    }

    // The step that `ask` has drawn.
    __device__ __forceinline__ int next() {
        if (draws()) {
            const u32 value = drawn << 1 | (queue.taken / StepQueue::SLOTS % 2 ^ 1);
            for (u32 block = 0; block < CLUSTER; ++block) {
                store_slot(queue.slots + queue.taken % StepQueue::SLOTS, block, value);
            }
        }
        __syncwarp();
        return queue.next();
    }
};

}  // namespace weft
