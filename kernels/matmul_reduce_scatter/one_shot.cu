// reduce_scatter(C) in one shot, behind the product of cuBLAS that gives C: out = sum over ranks src of C_src[rank].
//
// C [W, m, N] is this rank's partial result in 16 bits, out [m, N]. The ranks' parts are summed in float32 in the order of
// the ranks and rounded once to C's dtype, or with OUT_FLOAT32 not at all. Before that they get, if there are BIAS and
// RESIDUAL, a row of N numbers and a matrix [m, N], both of C's dtype.
//
// Who writes: block b, its range of part dst, into rank dst's half, viewed [W - 1, m, N] (the sender's slot: its rank, less
// one behind dst). Who waits: block b, for its range of the own part from every peer, which it adds up.
// Flags, the end of the use and why nobody waits for ever: one_shot.cuh.

#include "../device/numbers.cuh"
#include "../device/one_shot.cuh"

using weft::u32;
using weft::u64;

namespace {

using Number = weft::DTYPE;

struct Params {
    weft::Watch watch;
    weft::Half half;
    const uint4* c;  // C [W, m, N]
    uint4* inbox;  // the own half
    uint4* out;  // [m, N]
    const uint4* bias;  // [N]
    const uint4* residual;  // [m, N]
    u32 vectors;  // of a part
    u32 columns;  // vectors of a row
    int average;
    int reserved;
};

// total += the 8 numbers of a vector.
__device__ __forceinline__ void add(const uint4& v, float* total) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float pair[2];
        Number::unpack(words[w], pair);
        total[2 * w] += pair[0];
        total[2 * w + 1] += pair[1];
    }
}

// The own part as rank `src` has computed it.
__device__ __forceinline__ const uint4* part_of(const Params& p, int src) {
    const int rank = p.watch.rank;
    return src == rank ? p.c + static_cast<u64>(rank) * p.vectors
                       : p.inbox + static_cast<u64>(src - (src > rank)) * p.vectors;
}

// Vector `at` of the result, from the sum of all ranks' parts.
__device__ __forceinline__ void store_result(const Params& p, u32 at, float* total) {
    const float scale = p.average ? 1.0f / WORLD_SIZE : 1.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] *= scale;
#if BIAS
    add(__ldg(p.bias + at % p.columns), total);
#endif
#if RESIDUAL
    add(__ldg(p.residual + at), total);
#endif
#if OUT_FLOAT32
    uint4* out = p.out + 2 * static_cast<u64>(at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* t = total + 4 * i;
        out[i] = make_uint4(
            __float_as_uint(t[0]), __float_as_uint(t[1]), __float_as_uint(t[2]), __float_as_uint(t[3]));
    }
#else
    p.out[at] =
        make_uint4(Number::pack(total), Number::pack(total + 2), Number::pack(total + 4), Number::pack(total + 6));
#endif
}

// The block's range of the own part, of all ranks, many loads at once.
__device__ __forceinline__ void add_up(const Params& p, const weft::Range& range) {
    constexpr int BESIDE = weft::FEW ? WORLD_SIZE : 1, EACH = weft::FEW ? weft::AHEAD / BESIDE : 4;
    for (u32 at = range.first + threadIdx.x; at < range.last; at += EACH * weft::THREADS) {
        float total[EACH][8] = {};
#pragma unroll 1
        for (int src = 0; src < WORLD_SIZE; src += BESIDE) {
            uint4 v[EACH][BESIDE];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < BESIDE; ++j) {
                    const u32 index = at + i * weft::THREADS;
                    if (index < range.last) v[i][j] = weft::load_payload(part_of(p, src + j) + index);
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < BESIDE; ++j) add(v[i][j], total[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const u32 index = at + i * weft::THREADS;
            if (index < range.last) store_result(p, index, total[i]);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(weft::THREADS, 1)
    reduce_scatter_one_shot(const __grid_constant__ Params p) {
    const u32 use = p.watch.words[p.half.epoch] + 1;
    const weft::Range range(p.vectors);
    const int rank = p.watch.rank;
    bool sends = false;
    weft::move<weft::PEERS>(
        range,
        [&](int i, u32 at) {
            return __ldg(p.c + static_cast<u64>(weft::peer_of(p.watch, i)) * p.vectors + at);
        },
        [&] { sends = weft::block_may_send(p.watch, p.half, use); },
        [&](int i, u32 at, const uint4& v) {
            const int peer = weft::peer_of(p.watch, i), slot = rank - (rank > peer);
            uint4* to = p.inbox + static_cast<u64>(slot) * p.vectors + at;
            if (sends) *weft::on_rank(to, p.watch, p.half, peer) = v;
        });
    weft::announce(p.watch, p.half, use, sends);
    weft::await(p.watch, p.half, use);
    add_up(p, range);
    __syncthreads();
    weft::leave(p.watch, p.half, use);
}
