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

// What two_shot does with a thread's vectors of each part. COUNT at once where they are many: a thread that waits for the
// memory with one vector at a time does not keep the links busy.
template <bool WHOLE>
struct TwoShot {
    const Params& p;
    const u32 stride = gridDim.x * blockDim.x;  // to a thread's next vector
    const u32 results;  // the second half of a sender's slots is for results
    weft::Parts parts;

    __device__ __forceinline__ explicit TwoShot(const Params& params) : p(params), results(p.slots.capacity / 2) {}

    __device__ __forceinline__ void load_all(u32 at) {
        parts.load_all([&](int part, u32 i) { return load_part(part, i); }, at);
    }

    __device__ __forceinline__ uint4 load_part(int part, u32 at) const {
        return load<WHOLE>(p, static_cast<u64>(part) * p.vectors + at);
    }

    // From `s` on, whose vectors are loaded already, and before `end`.
    __device__ __forceinline__ void send(const Use& use, Share s, u32 end) {
        while (s.at < end) {
            parts.send_all([&](int part, u32 i) { return load_part(part, i); }, use, s);
            s.next();
            if (s.at < end) load_all(s.at);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void reduce(const Use& use, const Share& s) const {
        const u64 own = static_cast<u64>(RANK) * p.vectors + s.at;
        const auto give = [&](int k, const weft::Numbers& total) {
            const uint4 result = total.rounded();
            use.send_to_all(results + s.index + k * blockDim.x, weft::to_wire(result));
            store<WHOLE>(p, own + k * stride, result);
        };
        if constexpr (COUNT == 1) {
            give(0, weft::take_reduced<Reduce>(use, s.index, load<WHOLE>(p, own)));
        } else {
            uint4 in[COUNT * WORLD_SIZE];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) in[k * WORLD_SIZE + RANK] = load<WHOLE>(p, own + k * stride);
            use.take_all<COUNT>(s.index, in, blockDim.x);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                give(k, weft::reduced<Reduce>([&](int src) { return in[k * WORLD_SIZE + src]; }));
            }
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void collect(const Use& use, const Share& s) const {
        const auto give = [&](int k, int src, const uint4& v) {
            store<WHOLE>(p, static_cast<u64>(src) * p.vectors + s.at + k * stride, v);
        };
        if constexpr (COUNT == 1) {
            weft::store_all(use, results + s.index, [&](int src, const uint4& v) { give(0, src, v); });
        } else {
            uint4 in[COUNT * WORLD_SIZE];
            use.take_all<COUNT>(results + s.index, in, blockDim.x);
#pragma unroll
            for (int i = 0; i < COUNT * WORLD_SIZE; ++i) {
                if (i % WORLD_SIZE != RANK) give(i / WORLD_SIZE, i % WORLD_SIZE, in[i]);
            }
        }
    }
};

template <bool WHOLE>
__device__ __forceinline__ void two_shot_of(const Params& p) {
    weft::begin();
    TwoShot<WHOLE> steps(p);
    if (const Share s; s.at < p.vectors) steps.load_all(s.at);
    const Use use(p.slots);
    steps.send(use, Share(), p.vectors);
    for (Share s; s.at < p.vectors; s.next()) steps.template reduce<1>(use, s);
    for (Share s; s.at < p.vectors; s.next()) steps.template collect<1>(use, s);
    use.leave();
}

// As many uses as the slots ask for, one after the other, and while a thread collects the results of one the next is
// under way. push.cuh's claim holds for each thread's slots: before a rank sends for use e it has taken, in e - 1, what
// the peer sent for that, which the peer did when it had taken all for the first step of e - 2; and before it sends
// results of e it has taken what the peer sent for e, when the peer had collected e - 2. It holds behind the launch, too,
// because every thread has vectors in the last use: only the first one may be smaller. A thread without one there sends
// something all the same, and so hears, as the others do, that the peers' kernel before this one has ended.
template <bool WHOLE>
__device__ __forceinline__ void two_shot_rounds_of(const Params& p) {
    constexpr int COUNT = weft::FEW && WORLD_SIZE <= 4 ? 8 / WORLD_SIZE : 1;
    weft::begin();
    TwoShot<WHOLE> steps(p);
    const u32 whole_round = steps.results / blockDim.x * steps.stride;
    u32 from = 0, to = (p.vectors - 1) % whole_round + 1;
    Share first;
    if (first.at < to) steps.load_all(first.at);
    Use use(p.slots);
    const auto each = [&](const auto& some, const auto& one) {
        Share s = first;
        for (; s.at + (COUNT - 1) * steps.stride < to; s.at += COUNT * steps.stride, s.index += COUNT * blockDim.x) some(s);
        for (; s.at < to; s.next()) one(s);
    };

    steps.send(use, first, to);
    if (first.at >= to && to < p.vectors) {
        use.send_to_all(first.index, weft::to_wire(make_uint4(0, 0, 0, 0)));
        for (int i = 1; i < WORLD_SIZE; ++i) use.take(weft::peer_of(i), first.index);
    }
    for (;;) {
        each([&](const Share& s) { steps.template reduce<COUNT>(use, s); },
             [&](const Share& s) { steps.template reduce<1>(use, s); });
        const Use last = use;
        Share ahead = first;
        const bool more = to < p.vectors;
        if (more) {
            use.begin(use.epoch + 1);
            ahead.at += to - from;
            steps.load_all(ahead.at);
            steps.send(use, ahead, to + whole_round);
        }
        each([&](const Share& s) { steps.template collect<COUNT>(last, s); },
             [&](const Share& s) { steps.template collect<1>(last, s); });
        use.lost |= last.lost;
        if (!more) break;
        first = ahead;
        from = to;
        to += whole_round;
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

extern "C" __global__ void __launch_bounds__(512, 1) two_shot_rounds(const __grid_constant__ Params p) {
    two_shot_rounds_of<true>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) one_shot_any(const __grid_constant__ Params p) {
    one_shot_of<false>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) two_shot_any(const __grid_constant__ Params p) {
    two_shot_of<false>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) two_shot_rounds_any(const __grid_constant__ Params p) {
    two_shot_rounds_of<false>(p);
}
