// out = all ranks' x side by side, in any dimension: out [rows, W, row] and x [rows, row] in bytes. Any dtype, bit by bit.
//
// Every rank sends its vectors to all, and stores what arrives and its own into `out`, where it belongs. For vectors of
// 16 bytes that are whole, and for anything (`_any`). Large inputs go by rounds, several epochs in one launch.
//
// With ROOT only that rank receives x. One thread of a block tells the others that it is there, each time it sends: a
// rank that hears nothing of another one could send for an epoch whose slots are not empty there.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh, credits.cuh), with corrections (exact.cuh). x may be the part
// of `out` that becomes x. Graph-safe. docs/protocol.md#ll-exchange, #exact-data, #credits

#ifdef ROOT
#undef IN_TURN  // there is one to send to
#endif
#include "collective/exact.cuh"

#ifndef ROOT
#define ROOT -1  // all ranks receive
#endif

namespace {

using weft::Epoch;
using weft::ThreadShare;
using weft::u32;

struct Params {
    weft::ExchangeSlots slots;
    weft::Slices x;  // one part
    weft::Slices out;
    u32 vectors;  // of x
    u32 room;  // slots of a sender that data takes in one epoch
};

__device__ __forceinline__ bool receives() { return ROOT < 0 || RANK == ROOT; }

template <bool WHOLE>
struct Steps {
    static constexpr u32 TRIPS = 1;
    const Params& p;
    uint4 next;  // of x, loaded ahead

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32) {
        if (s.at < end) next = weft::SliceVector<WHOLE>(p.x, s.at).load(0);
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        const weft::ExactEpoch exact{epoch, p.room};
        while (s.at < end) {
            if constexpr (ROOT < 0) {
                exact.send_to_all(s.index, next);
            } else {
                send_to_root(exact, s.index);
            }
            if (receives()) weft::SliceVector<WHOLE>(p.out, s.at).store(RANK, next);
            s.skip(threads);
            load(s, end, threads);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) const {
        if (receives()) {
            weft::receive_parts<WHOLE, COUNT>(p.out, weft::ExactEpoch{epoch, p.room}, s, end, threads);
        } else if (threadIdx.x == 0) {
            for (; s.at < end; s.skip(threads)) weft::store_all(epoch, s.index, [](int, const uint4&) {});
        }
    }

private:
    __device__ __forceinline__ void send_to_root(const weft::ExactEpoch& exact, u32 index) const {
        if (RANK != ROOT) exact.send(ROOT, index, next);
        if (threadIdx.x != 0) return;
#pragma unroll 1
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const int peer = weft::peer_of(i);
            if (peer != ROOT) exact.epoch.send(peer, index, weft::ll_encode(make_uint4(1, 1, 1, 1)));
        }
    }
};

}  // namespace

#include "collective/entries.cuh"
