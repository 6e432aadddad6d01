// all_gather(A) in one shot, for a product of cuBLAS behind it: gathered[src] = A[src] [m, K] of every rank src.
//
// Who writes: block b, its range of the own rows, into slot `rank` of every peer's half, viewed [W, m, K], and into the own
// place of `gathered`. Who waits: block b, for the same range of every peer, which it copies from the own half to `gathered`:
// a product may read that for as long as it likes while the peers already write for the next use.
// Flags, the end of the use and why nobody waits for ever: one_shot.cuh.

#include "../device/one_shot.cuh"

using weft::u32;
using weft::u64;

namespace {

struct Params {
    weft::Watch watch;
    weft::Half half;
    const uint4* a;  // A [m, K], rows `stride` vectors apart
    uint4* inbox;  // the own half
    uint4* gathered;  // [W, m, K]
    u32 vectors;  // of a shard
    u32 columns;  // vectors of a row
    u32 stride;
    u32 reserved;
};

__device__ __forceinline__ uint4 load_own(const Params& p, u32 at) {
    if (p.stride == p.columns) return __ldg(p.a + at);
    return __ldg(p.a + static_cast<u64>(at / p.columns) * p.stride + at % p.columns);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(weft::THREADS, 1) all_gather_one_shot(const __grid_constant__ Params p) {
    const u32 use = p.watch.words[p.half.epoch] + 1;
    const weft::Range range(p.vectors);
    const u64 own = static_cast<u64>(p.watch.rank) * p.vectors;
    bool sends = false;
    weft::move<1>(
        range,
        [&](int, u32 at) { return load_own(p, at); },
        [&] { sends = weft::block_may_send(p.watch, p.half, use); },
        [&](int, u32 at, const uint4& v) {
            if (sends) {
#pragma unroll(weft::FEW ? 8 : 1)
                for (int i = 0; i < weft::PEERS; ++i) {
                    const int peer = weft::peer_of(p.watch, i);
                    *weft::on_rank(p.inbox + own + at, p.watch, p.half, peer) = v;
                }
            }
            p.gathered[own + at] = v;
        });
    weft::announce(p.watch, p.half, use, sends);
    weft::await(p.watch, p.half, use);
    const auto place = [&](int i, u32 at) { return static_cast<u64>(weft::peer_of(p.watch, i)) * p.vectors + at; };
    weft::move<weft::PEERS>(
        range,
        [&](int i, u32 at) { return weft::load_payload(p.inbox + place(i, at)); },
        [] {},
        [&](int i, u32 at, const uint4& v) { p.gathered[place(i, at)] = v; });
    __syncthreads();
    weft::leave(p.watch, p.half, use);
}
