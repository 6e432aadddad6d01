// all_gather(A) in one shot, for a cuBLAS matmul after it: gathered[src] = A[src] [m, K] of every rank src; or with
// `side_by_side` gathered[:, src] of [m, W, K].
//
// Who writes and who waits: LL exchange (ll_exchange.cuh). Every rank sends its vectors to all peers, and stores its
// own and those that arrive into `gathered`: the matmul may read that while peers already send for the next call.
// Graph-safe.
// docs/protocol.md#ll-exchange has the proof.
//
// With SCALED the scales of the rows, of fp8, go with them: `scale_vectors` after those of A, to gathered_scales.
//
// For matmuls only: of two adjacent 16-bit numbers with all bits set, two NaNs, another pair of NaNs arrives.
// (Of four fp8 numbers that are NaNs one may become a number: the row has others.)

#include "comm/ll_exchange.cuh"

namespace {

using weft::ThreadShare;
using weft::u32;
using weft::u64;

struct Params {
    weft::ExchangeSlots slots;
    const uint4* a;  // A [m, K], rows `stride` vectors apart
    uint4* gathered;  // [W, m, K], or [m, W, K]
    u32 vectors;  // of a shard
    u32 columns;  // vectors of a row
    u32 stride;
    u32 scale_vectors;  // of a shard
    u32 side_by_side;
#if SCALED
    const uint4* scales;  // [m]
    uint4* gathered_scales;  // [W, m]
#endif
};

__device__ __forceinline__ uint4 load_own(const Params& p, u32 at) {
#if SCALED
    const u32 rows = p.vectors - p.scale_vectors;
    if (at >= rows) return weft::load_vector(p.scales + (at - rows));
#endif
    if (p.stride == p.columns) return weft::load_vector(p.a + at);
    return weft::load_vector(p.a + static_cast<u64>(at / p.columns) * p.stride + at % p.columns);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) all_gather_one_shot(const __grid_constant__ Params p) {
    const auto store = [&](int src, u32 at, const uint4& v) {
#if SCALED
        const u32 rows = p.vectors - p.scale_vectors;
        uint4* to = at < rows ? p.gathered + static_cast<u64>(src) * rows + at
                              : p.gathered_scales + static_cast<u64>(src) * p.scale_vectors + (at - rows);
        weft::store_vector(to, v);
#else
        u64 to = static_cast<u64>(src) * p.vectors + at;
        if (p.side_by_side) {
            const u32 row = at / p.columns;
            to = (static_cast<u64>(row) * WORLD_SIZE + src) * p.columns + (at - row * p.columns);
        }
        weft::store_vector(p.gathered + to, v);
#endif
    };
    uint4 v = make_uint4(0, 0, 0, 0);
    if (const ThreadShare s; s.at < p.vectors) v = load_own(p, s.at);
    const weft::Epoch epoch(p.slots);

    for (ThreadShare s; s.at < p.vectors;) {
        epoch.send_to_all(s.index, weft::ll_encode(v));
        store(RANK, s.at, v);
        s.next();
        if (s.at < p.vectors) v = load_own(p, s.at);
    }

    for (ThreadShare s; s.at < p.vectors; s.next()) {
        weft::store_all(epoch, s.index, [&](int src, const uint4& in) { store(src, s.at, in); });
    }
    epoch.leave();
}
