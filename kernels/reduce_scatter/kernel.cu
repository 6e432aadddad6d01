// out = this rank's part of the reduction of all ranks' x (sum, avg, max or min), cut in any dimension: x [rows, W, row]
// and out [rows, row] in bytes. With CHOICES x is what experts' outputs add up to (collective/combine.cuh).
//
// Every rank sends part q of its x to rank q, which reduces all of them and its own in float32 in rank order, and
// rounds once. For vectors of 16 bytes that are whole, and for anything (`_any`). Large inputs go by rounds, several
// epochs in one launch.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh, credits.cuh). `out` may be this rank's part of x.
// Graph-safe. docs/protocol.md#ll-exchange, #credits

#include "collective/rounds.cuh"
#include "collective/slices.cuh"
#include "collective/combine.cuh"

#ifndef REDUCE
#error "REDUCE: sum, avg, max or min"
#endif

namespace {

using weft::Epoch;
using weft::ThreadShare;
using weft::u32;
using Reduce = weft::reduce::REDUCE;

struct Params {
    weft::ExchangeSlots slots;
    weft::Slices x;
    weft::Slices out;  // one part
    u32 vectors;  // of a part
    u32 room;  // slots of a sender in one epoch
#if CHOICES
    weft::Combine combine;
#endif
};

template <bool WHOLE>
struct Steps {
    static constexpr u32 TRIPS = 1;
    const Params& p;
    weft::Parts next;  // loaded ahead

    __device__ __forceinline__ explicit Steps(const Params& params) : p(params) {}

    __device__ __forceinline__ uint4 load_part(int part, u32 at) const {
        const weft::SliceVector<WHOLE> v(p.x, at);
#if CHOICES
        return p.combine.load(v.offset(part) / 16);
#else
        return v.load(part);
#endif
    }

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32) {
        if (s.at < end) next.load_all([&](int part, u32 at) { return load_part(part, at); }, s.at);
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        while (s.at < end) {
            next.send_all([&](int part, u32 at) { return load_part(part, at); }, epoch, s);
            s.skip(threads);
            load(s, end, threads);
        }
    }

    __device__ __forceinline__ void store(u32 at, const weft::Numbers& total) const {
        weft::SliceVector<WHOLE>(p.out, at).store(0, total.rounded());
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) const {
        if constexpr (COUNT == 1) {
            if (s.at >= end) return;
            uint4 own = load_part(RANK, s.at);
            while (s.at < end) {
                store(s.at, weft::take_reduced<Reduce>(epoch, s.index, own));
                s.skip(threads);
                if (s.at < end) own = load_part(RANK, s.at);
            }
        } else {
            const u32 stride = gridDim.x * threads;
            for (; s.at + (COUNT - 1) * stride < end; s.skip(threads, COUNT)) {
                uint4 in[COUNT * WORLD_SIZE];
#pragma unroll
                for (u32 k = 0; k < COUNT; ++k) in[k * WORLD_SIZE + RANK] = load_part(RANK, s.at + k * stride);
                epoch.take_all<COUNT>(s.index, in, threads);
#pragma unroll
                for (u32 k = 0; k < COUNT; ++k) {
                    store(s.at + k * stride, weft::reduced<Reduce>([&](int src) { return in[k * WORLD_SIZE + src]; }));
                }
            }
            receive<1>(epoch, s, end, threads);
        }
    }
};

}  // namespace

#include "collective/entries.cuh"
