// What a rank that runs alone (the suite alone) is told by peers that do as it does: behind each flag that it sets at a peer, as
// late as links are, the flag of every peer for the same chunk, and none before links could have brought what it stands
// for.

#include "ptx/sync.cuh"

using weft::u32;
using weft::u64;

struct Params {
    u32* flags;  // of the local buffer, [world][flags_per_rank]
    const u32* told;  // the own ones at a peer
    const u32* chunks;  // [count]: which flag, in the order in which they are set
    const u32* due;  // of each, nanoseconds after the start: growing
    const u32* use;  // what is written
    int count, flags_per_rank, world, trip;  // nanoseconds
    u64 deadline;  // likewise
};

// One block.
extern "C" __global__ void announce(const __grid_constant__ Params p) {
    const u64 start = weft::nanoseconds();
    const u32 use = *p.use;
    for (int i = threadIdx.x; i < p.count; i += blockDim.x) {
        const u32 flag = p.chunks[i];
        while (weft::load_relaxed(p.told + flag) != use) {
            if (weft::nanoseconds() - start > p.deadline) return;  // the rank will miss its own, and say so
        }
        const u64 seen = max(weft::nanoseconds(), start + p.due[i]) + p.trip;
        while (weft::nanoseconds() < seen) {}
        // No fence: what they stand for has been there since before the launch.
        for (int rank = 1; rank < p.world; ++rank) {
            weft::post_after_fence(p.flags + rank * p.flags_per_rank + flag, use);
        }
    }
}
