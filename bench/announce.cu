// Sets the flags of a workspace when links would have brought what they stand for: for a rank that runs alone (alone.py).

#include "sync.cuh"

using weft::u32;
using weft::u64;

struct Params {
    u32* words;
    const u32* flags;  // which of them
    const u32* due;  // of each, nanoseconds after the start: growing
    const u32* use;  // what is written
    int count;
    int reserved;
};

// One block.
extern "C" __global__ void announce(const __grid_constant__ Params p) {
    const u64 start = weft::nanoseconds();
    const u32 use = *p.use;
    for (int i = threadIdx.x; i < p.count; i += blockDim.x) {
        while (weft::nanoseconds() < start + p.due[i]) __nanosleep(100);
        weft::post_flag(p.words + p.flags[i], use);
    }
}
