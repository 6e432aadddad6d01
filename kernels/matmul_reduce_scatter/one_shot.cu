// reduce_scatter(C) in one shot, after the cuBLAS matmul that computes C: out = sum over ranks src of C_src[rank].
//
// C [W, m, N] is this rank's partial result, out [m, N]. The ranks' parts are summed in float32 in rank order and
// rounded once to C's dtype, or with OUT_FLOAT32 not at all. Before that BIAS adds a row of N numbers and RESIDUAL a
// matrix [m, N], both of C's dtype.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh); part q of C goes to rank q, which adds its own. Graph-safe.
// docs/protocol.md#ll-exchange has the proof.

#include "comm/ll_exchange.cuh"

namespace {

using weft::Numbers;
using weft::ThreadShare;
using weft::u32;
using weft::u64;

struct Params {
    weft::ExchangeSlots slots;
    const uint4* c;  // C [W, m, N]
    uint4* out;  // [m, N]
    const uint4* bias;  // [N]
    const uint4* residual;  // [m, N]
    u32 vectors;  // of a part
    u32 columns;  // vectors of a row
    int average;
    int reserved;
};

__device__ __forceinline__ void add(const uint4& v, Numbers& total) {
    const Numbers more(v);
#pragma unroll
    for (int i = 0; i < weft::ELEMENTS; ++i) total.of[i] += more.of[i];
}

__device__ __forceinline__ void store_result(const Params& p, u32 at, const Numbers& total) {
#if OUT_FLOAT32
    using weft::float32;
    constexpr int VECTORS = weft::ELEMENTS / 4;
    uint4* out = p.out + VECTORS * static_cast<u64>(at);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const float* t = total.of + 4 * i;
        const uint4 v =
            make_uint4(float32::pack(t), float32::pack(t + 1), float32::pack(t + 2), float32::pack(t + 3));
        weft::store_vector(out + i, v);
    }
#else
    weft::store_vector(p.out + at, total.rounded());
#endif
}

// The local terms of a thread, loaded before it waits for the peers.
struct Own {
    uint4 part;
#if BIAS
    uint4 bias;
#endif
#if RESIDUAL
    uint4 residual;
#endif

    __device__ __forceinline__ Own(const Params& p, u32 at) {
        part = weft::load_vector(p.c + static_cast<u64>(RANK) * p.vectors + at);
#if BIAS
        bias = weft::load_vector(p.bias + at % p.columns);
#endif
#if RESIDUAL
        residual = weft::load_vector(p.residual + at);
#endif
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1)
    reduce_scatter_one_shot(const __grid_constant__ Params p) {
    const auto load_part = [&](int part, u32 at) {
        return weft::load_vector(p.c + static_cast<u64>(part) * p.vectors + at);
    };
    weft::Parts parts;
    if (const ThreadShare s; s.at < p.vectors) parts.load_all(load_part, s.at);
    const weft::Epoch epoch(p.slots);

    for (ThreadShare s; s.at < p.vectors;) {
        parts.send_all(load_part, epoch, s);
        s.next();
        if (s.at < p.vectors) parts.load_all(load_part, s.at);
    }

    const float scale = p.average ? 1.0f / WORLD_SIZE : 1.0f;
    for (ThreadShare s; s.at < p.vectors; s.next()) {
        const Own own(p, s.at);
        Numbers total = weft::take_reduced<weft::reduce::sum>(epoch, s.index, own.part);
#pragma unroll
        for (int i = 0; i < weft::ELEMENTS; ++i) total.of[i] *= scale;
#if BIAS
        add(own.bias, total);
#endif
#if RESIDUAL
        add(own.residual, total);
#endif
        store_result(p, s.at, total);
    }
    epoch.leave();
}
