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
using weft::Share;
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
    weft::begin();
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

template <bool WHOLE>
__device__ __forceinline__ void two_shot_of(const Params& p) {
    weft::begin();
    const auto load_part = [&](int part, u32 at) { return load<WHOLE>(p, static_cast<u64>(part) * p.vectors + at); };
    weft::Parts parts;
    if (const Share s; s.at < p.vectors) parts.load_all(load_part, s.at);
    const Use use(p.slots);
    const u32 results = p.slots.capacity / 2;  // the second half of a sender's slots is for results

    for (Share s; s.at < p.vectors;) {
        parts.send_all(load_part, use, s);
        s.next();
        if (s.at < p.vectors) parts.load_all(load_part, s.at);
    }

    for (Share s; s.at < p.vectors; s.next()) {
        const u64 own = static_cast<u64>(RANK) * p.vectors + s.at;
        const uint4 result = weft::take_reduced<Reduce>(use, s.index, load<WHOLE>(p, own)).rounded();
        use.send_to_all(results + s.index, weft::to_wire(result));
        store<WHOLE>(p, own, result);
    }

    for (Share s; s.at < p.vectors; s.next()) {
        weft::store_all(use, results + s.index, [&](int src, const uint4& v) {
            store<WHOLE>(p, static_cast<u64>(src) * p.vectors + s.at, v);
        });
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
