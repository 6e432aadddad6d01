// The gate in front of pushes by a copy engine, and the end of a use that no other kernel ends.
//
// gate: the peers' buffers are free, and which use this is. Use e = EPOCH[buffer] + 1. Who writes: rank p posts
// done(buffer)[p] = e - 1 in this rank's words when it has left the buffer's last use. Who waits: lane p of the
// one warp. Then TICKET[buffer] = e.
//
// On the stream behind the gate: copies of chunks into the peers' buffers, each followed by a 4-byte copy of
// the TICKET[buffer] word into the peer's flag word. That copy reads the word when it runs, so a captured graph
// goes on counting when it is replayed, and the stream keeps data before flag.
//
// When a wait has expired, here or in an earlier kernel, the ticket stands still: the flags that follow announce
// nothing, and a peer that waits for them reports this rank. The copies behind the gate cannot be called off; for
// a peer that still reads what they overwrite, the gate says farewell first (abort_notice.cuh).
//
// leave: what came before it on the stream has read all it wanted of the buffer. EPOCH[buffer] + 1 uses are over,
// and every rank is told: done(buffer)[rank], by its lane of the warp. Nobody is waited for.

#include "comm/abort_notice.cuh"

struct Params {
    weft::WaitParams watch;
    int world_size;  // up to 32: a lane for each rank
    int ticket;  // index of the buffer's TICKET word
    int done;  // index of the buffer's first done word
    int epoch;  // index of the buffer's EPOCH word
    weft::u64 span;  // bytes from this rank's copy of an address to the next rank's
};

extern "C" __global__ void __launch_bounds__(32) gate(const __grid_constant__ Params p) {
    const int peer = threadIdx.x;
    const weft::u32 last = p.watch.words[p.epoch];
    const bool serves = peer < p.world_size && peer != p.watch.rank;
    const weft::u32 blamed = weft::broken_by(p.watch);
    // A lane may find the group broken where another did not, by a kernel of another stream meanwhile.
    bool free = !serves || blamed == 0;
    if (serves && free) free = weft::wait_flag(p.watch, peer, p.done + peer, last, weft::WAIT_FREE);
    const unsigned late = __ballot_sync(~0u, !free);
    if (late == 0) {
        if (peer == 0) p.watch.words[p.ticket] = last + 1;
    } else if (serves) {
        weft::post_abort_notice(p.watch, p.span, peer, blamed != 0 ? blamed - 1 : __ffs(late) - 1);
    }
}

extern "C" __global__ void __launch_bounds__(32) leave(const __grid_constant__ Params p) {
    const int peer = threadIdx.x;
    const int rank = p.watch.rank;
    weft::u32* epoch = p.watch.words + p.epoch;
    const weft::u32 use = *epoch + 1;
    __syncwarp();
    if (peer == 0) *epoch = use;
    if (peer < p.world_size) {
        weft::check_abort_notice(p.watch, peer, p.done, use);
        const weft::u64 there = static_cast<weft::u64>(static_cast<long long>(peer - rank)) * p.span;
        char* words = reinterpret_cast<char*>(p.watch.words) + there;
        weft::post_flag(reinterpret_cast<weft::u32*>(words) + p.done + rank, use);
    }
}
