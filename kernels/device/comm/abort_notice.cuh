// Abort notices: a rank tells its peers that what it sends from now on is invalid, where it cannot help sending (copies
// that are enqueued on a stream already).
//
// Who writes: rank p, fault[ABORT_NOTICE + p] = 1 + the rank it blames, at every peer; release, system scope, before
// its copies. Only a reset clears it. Who reads: whoever ends an epoch of a buffer that copy engines write, after the
// last read of it; acquire, system scope. Nobody waits. Graph-safe. docs/protocol.md#abort-notices has the proof.

#pragma once

#include "comm/double_buffer.cuh"

namespace weft {

constexpr u32 ABORT_NOTICE = 32;  // index of rank 0's word; up to 32 ranks

// To one peer.
__device__ __forceinline__ void post_abort_notice(
    const WaitParams& watch, const BufferWords& buffer, int peer, int blamed) {
    post_flag(on_rank(watch.fault, watch, buffer, peer) + ABORT_NOTICE + watch.rank, 1 + blamed);
}

// The end of an epoch, by one thread for each rank, after all reads of the buffer by any thread: asks for that rank's
// notice, and writes its done word.
__device__ __forceinline__ void end_epoch_at(
    const WaitParams& watch, const BufferWords& buffer, int peer, u32 epoch) {
    if (peer != watch.rank) {
        const u32 said = load_acquire(watch.fault + ABORT_NOTICE + peer);
        if (said != 0) report(watch, peer, buffer.done + peer, epoch, said, ABORTED);
    }
    post_flag(on_rank(watch.words, watch, buffer, peer) + buffer.done + watch.rank, epoch);
}

}  // namespace weft
