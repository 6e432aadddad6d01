// out = what all ranks' x make together (sum, avg, max or min), every rank pushing into every rank.
//
// push.cuh has the protocol and its proof. Two forms that give the same bits, in float32 in rank order, rounded
// once:
//   one_shot  every rank sends its vectors to all, and reduces what came.
//   two_shot  vector j of part q goes to rank q, which reduces the ranks' and sends the result to all: less on
//             the wire from three ranks on, one more trip. Every part has as many vectors, those past the end
//             hold zeros: so every block of every rank hears from every rank.
// Both stand here twice: for whole vectors at aligned addresses, and for anything.
//
// The order of loads and stores is what the time of a small call is made of: all that a thread loads, the epoch
// last, is under way before the first of it is looked at.

#include "push.cuh"

#ifndef REDUCE
#error "REDUCE: sum, avg, max or min"
#endif

namespace {

using weft::ELEMENTS;
using weft::FEW;
using weft::Numbers;
using weft::u32;
using weft::u64;
using weft::Use;
using Number = weft::Number;
using Element = Number::Storage;
using Reduce = weft::reduce::REDUCE;

struct Params {
    weft::Slots slots;
    const Element* x;
    Element* out;
    u64 numel;
    u32 vectors;  // one_shot: of the input; two_shot: of each part
    u32 aligned;  // x and out lie at multiples of 16 bytes
};

// A thread's vectors: `at` in the input, `index` among the block's slots. Warps are dealt to the blocks in
// turn, so that a small input is sent by many multiprocessors.
struct Share {
    u32 at, index;

    __device__ __forceinline__ Share() {
        at = ((threadIdx.x / 32) * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
        index = threadIdx.x;
    }

    __device__ __forceinline__ void next() {
        at += gridDim.x * blockDim.x;
        index += blockDim.x;
    }
};

// Vector `at` of the input; elements past its end are 0.
template <bool WHOLE>
__device__ __forceinline__ uint4 load(const Params& p, u64 at) {
    const u64 start = at * ELEMENTS;
    if (WHOLE || (p.aligned && start + ELEMENTS <= p.numel)) {
        return weft::load_vector(reinterpret_cast<const uint4*>(p.x) + at);
    }
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (start + i < p.numel) {
            const u32 bits = p.x[start + i];
            weft::word(v, i / Number::PER_WORD) |= bits << (16 * (i % Number::PER_WORD));
        }
    }
    return v;
}

template <bool WHOLE>
__device__ __forceinline__ void store(const Params& p, u64 at, uint4 v) {
    const u64 start = at * ELEMENTS;
    if (WHOLE || (p.aligned && start + ELEMENTS <= p.numel)) {
        weft::store_vector(reinterpret_cast<uint4*>(p.out) + at, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (start + i < p.numel) {
            const u32 bits = weft::word(v, i / Number::PER_WORD) >> (16 * (i % Number::PER_WORD));
            p.out[start + i] = static_cast<Element>(bits);
        }
    }
}

template <bool WHOLE>
__device__ __forceinline__ void one_shot_of(const Params& p) {
    uint4 own = make_uint4(0, 0, 0, 0);
    if (const Share s; s.at < p.vectors) own = load<WHOLE>(p, s.at);
    const Use use(p.slots);

    uint4 v = own;
    for (Share s; s.at < p.vectors;) {
        use.send_to_all(s.index, weft::to_wire(v));
        s.next();
        if (s.at < p.vectors) v = load<WHOLE>(p, s.at);
    }

    for (Share s; s.at < p.vectors;) {
        store<WHOLE>(p, s.at, weft::take_reduced<Reduce>(use, s.index, own).rounded());
        s.next();
        if (s.at < p.vectors) own = load<WHOLE>(p, s.at);
    }
    use.leave();
}

// One vector for every peer, in the order of peer_of; from many ranks on each is loaded when it is sent.
template <bool WHOLE>
struct Parts {
    uint4 of[FEW ? WORLD_SIZE : 1];

    __device__ __forceinline__ void load_all(const Params& p, u32 at) {
        if constexpr (FEW) {
#pragma unroll
            for (int i = 1; i < WORLD_SIZE; ++i) {
                of[i] = load<WHOLE>(p, static_cast<u64>(weft::peer_of(i)) * p.vectors + at);
            }
        }
    }

    __device__ __forceinline__ void send_all(const Params& p, const Use& use, const Share& s) const {
#pragma unroll(FEW ? 8 : 1)
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const int peer = weft::peer_of(i);
            const uint4 v = FEW ? of[FEW ? i : 0] : load<WHOLE>(p, static_cast<u64>(peer) * p.vectors + s.at);
            use.send(peer, s.index, weft::to_wire(v));
        }
    }
};

template <bool WHOLE>
__device__ __forceinline__ void two_shot_of(const Params& p) {
    Parts<WHOLE> parts;
    if (const Share s; s.at < p.vectors) parts.load_all(p, s.at);
    const Use use(p.slots);
    const u32 results = p.slots.capacity / 2;  // the second half of a sender's slots is for results

    for (Share s; s.at < p.vectors;) {
        parts.send_all(p, use, s);
        s.next();
        if (s.at < p.vectors) parts.load_all(p, s.at);
    }

    for (Share s; s.at < p.vectors; s.next()) {
        const u64 own = static_cast<u64>(RANK) * p.vectors + s.at;
        const uint4 result = weft::take_reduced<Reduce>(use, s.index, load<WHOLE>(p, own)).rounded();
        use.send_to_all(results + s.index, weft::to_wire(result));
        store<WHOLE>(p, own, result);
    }

    for (Share s; s.at < p.vectors; s.next()) {
        if constexpr (FEW) {
            uint4 in[WORLD_SIZE];
            use.take_all(results + s.index, in);
#pragma unroll
            for (int src = 0; src < WORLD_SIZE; ++src) {
                if (src != RANK) store<WHOLE>(p, static_cast<u64>(src) * p.vectors + s.at, in[src]);
            }
        } else {
#pragma unroll 1
            for (int i = 1; i < WORLD_SIZE; ++i) {
                const int src = weft::peer_of(i);
                const uint4 v = use.take(src, results + s.index);
                store<WHOLE>(p, static_cast<u64>(src) * p.vectors + s.at, v);
            }
        }
    }
    use.leave();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) one_shot(const __grid_constant__ Params p) {
    one_shot_of<true>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) two_shot(const __grid_constant__ Params p) {
    two_shot_of<true>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) one_shot_any(const __grid_constant__ Params p) {
    one_shot_of<false>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) two_shot_any(const __grid_constant__ Params p) {
    two_shot_of<false>(p);
}
