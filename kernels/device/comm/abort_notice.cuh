// Abort notices: a rank tells its peers that what it sends from now on is invalid, where it cannot help sending (copies
// that are enqueued on a stream already).
//
// Who writes: rank p, fault[ABORT_NOTICE + p] = 1 + the rank it blames, at every peer; release, system scope, before
// its copies. Only a reset clears it. Who reads: whoever ends an epoch of a buffer that copy engines write, after the
// last read of it; acquire, system scope. Nobody waits. Graph-safe. docs/protocol.md#abort-notices has the proof.

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

// By one thread, after all reads of the buffer by any thread in epoch `epoch`. `done`: the buffer's first done word.
__device__ __forceinline__ void check_abort_notice(const WaitParams& watch, int peer, u32 done, u32 epoch) {
    if (peer == watch.rank) return;
    const u32 said = load_acquire(watch.fault + ABORT_NOTICE + peer);
    if (said != 0) report(watch, peer, done + peer, epoch, said, ABORTED);
}

}  // namespace weft
