// The acquire kernel before copies by copy engines, a wait for a peer's, and the end of an epoch that no other
// kernel ends.
//
// acquire. Who waits: lane p of its one warp, until done(buffer)[p] >= EPOCH[buffer]; acquire, system scope. Then it
// writes EPOCH_TICKET[buffer] = e = EPOCH[buffer] + 1. After it on the stream: copies of chunks into the peers'
// buffers, each followed by a 4-byte copy of EPOCH_TICKET[buffer] into the peer's flag word; the stream keeps data
// before flag. If a wait has expired, here or earlier, EPOCH_TICKET stays, and every peer gets an abort notice before
// the copies (abort_notice.cuh).
//
// leave: what came before it on the stream has read all of the buffer. It counts EPOCH[buffer] and writes
// done(buffer)[rank] at every rank, one lane each; release, system scope. It waits for nobody.
//
// arrive. Who waits: one lane, until flag 0 of rank `peer` is at the epoch that runs; acquire, system scope. Who writes:
// the peer's copy engine, after what it has copied. What comes after it on the stream may read that.
//
// All are graph-safe. docs/protocol.md#copy-engines-and-the-acquire-kernel has the proof.

#include "comm/abort_notice.cuh"

struct Params {
    weft::WaitParams watch;
    weft::BufferWords buffer;
    int ticket;  // index of the buffer's EPOCH_TICKET word
    int peer;  // of `arrive`: who is waited for
};

extern "C" __global__ void __launch_bounds__(32) acquire(const __grid_constant__ Params p) {
    const int peer = threadIdx.x;
    const weft::u32 last = p.watch.words[p.buffer.epoch];
    const bool serves = peer < p.buffer.world_size && peer != p.watch.rank;
    const weft::u32 blamed = weft::broken_by(p.watch);
    // A lane may find the group broken where another did not, by a kernel of another stream meanwhile.
    bool free = !serves || blamed == 0;
    if (serves && free) free = weft::wait_flag(p.watch, peer, p.buffer.done + peer, last, weft::WAIT_FREE);
    const unsigned late = __ballot_sync(~0u, !free);
    if (late == 0) {
        if (peer == 0) p.watch.words[p.ticket] = last + 1;
    } else if (serves) {
        weft::post_abort_notice(p.watch, p.buffer, peer, blamed != 0 ? blamed - 1 : __ffs(late) - 1);
    }
}

extern "C" __global__ void __launch_bounds__(32) leave(const __grid_constant__ Params p) {
    const int peer = threadIdx.x;
    weft::u32* counted = p.watch.words + p.buffer.epoch;
    const weft::u32 epoch = *counted + 1;
    __syncwarp();
    if (peer == 0) *counted = epoch;
    if (peer < p.buffer.world_size) weft::end_epoch_at(p.watch, p.buffer, peer, epoch);
}

extern "C" __global__ void __launch_bounds__(32) arrive(const __grid_constant__ Params p) {
    const int flag = p.buffer.flags + p.peer * p.buffer.flags_per_rank;
    if (threadIdx.x == 0) weft::wait_flag(p.watch, p.peer, flag, p.watch.words[p.buffer.epoch] + 1, weft::WAIT_DATA);
}
