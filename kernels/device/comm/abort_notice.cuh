// Farewells: a rank tells its peers that what it sends from now on is worth nothing, where it cannot help sending.
//
// Kernels send nothing once a wait of their group has expired. Copies that wait on a stream cannot be called off:
// behind a gate that was not opened they overwrite a buffer that a late rank may be reading. So the gate says farewell to
// every peer before it ends, and whoever ends a use of a buffer listens behind its last read of the buffer. A copy that was
// read came behind the farewell, and the farewell is heard: the late rank reports it instead of using the numbers.
//
// Who writes: rank p, fault[ABORT_NOTICE + p] = 1 + the rank it blames, at every peer. Nobody puts it back but a reset. Who
// reads: the last block of each launch that ends a use. The group's workspaces share these words: a farewell may be heard
// in another one than that of the copies, by a rank that would be told at the next use all the same.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

constexpr u32 ABORT_NOTICE = 32;  // index of rank 0's word; up to 32 ranks

// To one peer. `span`: bytes from this rank's copy of an address to the next rank's.
__device__ __forceinline__ void post_abort_notice(const WaitParams& watch, u64 span, int peer, int blamed) {
    const u64 there = static_cast<u64>(static_cast<long long>(peer - watch.rank)) * span;
    u32* fault = reinterpret_cast<u32*>(reinterpret_cast<u64>(watch.fault) + there);
    post_flag(fault + ABORT_NOTICE + watch.rank, 1 + blamed);
}

// By one thread, behind all that any thread has read of the buffer in use `use`. `done`: the buffer's first done word.
__device__ __forceinline__ void check_abort_notice(const WaitParams& watch, int peer, u32 done, u32 use) {
    if (peer == watch.rank) return;
    const u32 said = load_acquire(watch.fault + ABORT_NOTICE + peer);
    if (said != 0) report(watch, peer, done + peer, use, said, ABORTED);
}

}  // namespace weft
