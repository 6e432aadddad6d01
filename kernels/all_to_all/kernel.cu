// out = every rank's part of x that is this rank's, side by side: x [rows, W, row] and out [rows', W, row'] in bytes, of
// which a part is the same bytes, one row after the other. Any two dimensions of a tensor, any dtype, bit by bit.
//
// Every rank sends part q of its x to rank q, and stores what arrives and its own part into `out`, where it belongs. For
// vectors of 16 bytes that are whole, and for anything (`_any`). Large inputs go by rounds, several epochs in one
// launch.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh, credits.cuh), with corrections (exact.cuh). x and `out` do not
// overlap. Graph-safe. docs/protocol.md#ll-exchange, #exact-data, #credits

#include "collective/exact.cuh"

namespace {

using weft::Epoch;
using weft::ThreadShare;
using weft::u32;

struct Params {
    weft::ExchangeSlots slots;
    weft::Slices x;
    weft::Slices out;
    u32 vectors;  // of a part
    u32 room;  // slots of a sender that data takes in one epoch
};

template <bool WHOLE>
struct Steps {
    static constexpr u32 TRIPS = 1;
    const Params& p;
    weft::Parts next;  // loaded ahead

    __device__ __forceinline__ explicit Steps(const Params& params) : p(params) {}

    __device__ __forceinline__ uint4 load_part(int part, u32 at) const {
        return weft::SliceVector<WHOLE>(p.x, at).load(part);
    }

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32) {
        if (s.at < end) next.load_all([&](int part, u32 at) { return load_part(part, at); }, s.at);
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        const weft::ExactEpoch exact{epoch, p.room};
        while (s.at < end) {
            next.each([&](int part, u32 at) { return load_part(part, at); }, epoch, s.at,
                [&](int peer, const uint4& v) { exact.send(peer, s.index, v); });
            weft::SliceVector<WHOLE>(p.out, s.at).store(RANK, load_part(RANK, s.at));
            s.skip(threads);
            load(s, end, threads);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) const {
        weft::receive_parts<WHOLE, COUNT>(p.out, weft::ExactEpoch{epoch, p.room}, s, end, threads);
    }
};

}  // namespace

#include "collective/entries.cuh"
