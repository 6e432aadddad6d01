// out = the reduction of all ranks' x (sum, avg, max or min), every rank pushing to every rank. With CHOICES x is what
// experts' outputs add up to (collective/combine.cuh).
//
// Two forms that give the same bits, in float32 in rank order, rounded once:
//   one_shot  every rank sends its vectors to all, and reduces what arrives.
//   two_shot  vector j of part q goes to rank q, which reduces it and sends the result to all: less traffic from three
//             ranks on, one more trip. All parts have as many vectors, those past the end hold zeros, so every block of
//             every rank receives from every rank.
// Both exist for whole vectors at aligned addresses, and for anything (`_any`); for large inputs there is
// two_shot_rounds, several epochs in one launch.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh, credits.cuh). Graph-safe. docs/protocol.md#ll-exchange,
// #credits
//
// Order of loads and stores decides the time of a small call: all that a thread loads, the epoch last, is in flight
// before the first of it is used.

#include "collective/rounds.cuh"
#include "collective/combine.cuh"

#ifndef REDUCE
#error "REDUCE: sum, avg, max or min"
#endif

namespace {

using weft::ELEMENTS;
using weft::ThreadShare;
using weft::u32;
using weft::u64;
using weft::Epoch;
using Number = weft::Number;
using Element = Number::Storage;
using Reduce = weft::reduce::REDUCE;

struct Params {
    weft::ExchangeSlots slots;
    const Element* x;
    Element* out;
    u64 numel;
    u32 vectors;  // one_shot: of the input; two_shot: of each part
    u32 aligned;  // x and out lie at multiples of 16 bytes
#if CHOICES
    weft::Combine combine;
#endif
};

// Vector `at` of x or out; elements past its end are 0.
template <bool WHOLE, bool OUT>
__device__ __forceinline__ uint4 load_from(const Params& p, u64 at) {
    const u64 start = at * ELEMENTS;
    if (WHOLE || (p.aligned && start + ELEMENTS <= p.numel)) {
        return weft::load_vector(reinterpret_cast<const uint4*>(OUT ? p.out : p.x) + at);
    }
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (start + i < p.numel) {
            const u32 bits = (OUT ? p.out : p.x)[start + i];
            weft::word(v, i / Number::PER_WORD) |= bits << (16 * (i % Number::PER_WORD));
        }
    }
    return v;
}

// Of the input.
template <bool WHOLE>
__device__ __forceinline__ uint4 input_of(const Params& p, u64 at) {
#if CHOICES
    return p.combine.load(static_cast<u32>(at));
#else
    return load_from<WHOLE, false>(p, at);
#endif
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
    if (const ThreadShare s; s.at < p.vectors) own = input_of<WHOLE>(p, s.at);
    const Epoch epoch(p.slots);

    do {
        uint4 v = own;
        for (ThreadShare s; s.at < p.vectors;) {
            epoch.send_to_all(s.index, weft::ll_encode(v));
            s.next();
            if (s.at < p.vectors) v = input_of<WHOLE>(p, s.at);
        }
    } while (epoch.next_turn());

    for (ThreadShare s; s.at < p.vectors;) {
        store<WHOLE>(p, s.at, weft::take_reduced<Reduce>(epoch, s.index, own).rounded());
        s.next();
        if (s.at < p.vectors) own = input_of<WHOLE>(p, s.at);
    }
    epoch.leave();
}

// The steps of two_shot, as rounds.cuh asks for them, with `threads` of a block that take part.
template <bool WHOLE>
struct TwoShot {
    static constexpr u32 TRIPS = 2;
    const Params& p;
    const u32 threads;
    const u32 stride = gridDim.x * threads;  // to a thread's next vector
    const u32 results = p.slots.capacity / 2;  // the second half of a sender's slots has the results
    weft::Parts parts;

    __device__ __forceinline__ TwoShot(const Params& params, u32 threads) : p(params), threads(threads) {}

    __device__ __forceinline__ uint4 load_part(int part, u32 at) const {
        return input_of<WHOLE>(p, static_cast<u64>(part) * p.vectors + at);
    }

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32) {
        if (s.at < end) parts.load_all([&](int part, u32 i) { return load_part(part, i); }, s.at);
    }

    __device__ __forceinline__ void skip(ThreadShare& s, u32 count = 1) const {
        s.at += count * stride;
        s.index += count * threads;
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32) {
        while (s.at < end) {
            parts.send_all([&](int part, u32 i) { return load_part(part, i); }, epoch, s);
            skip(s);
            load(s, end, threads);
        }
    }

    // Of `s` and the COUNT - 1 after it.
    template <int COUNT>
    __device__ __forceinline__ void reduce(const Epoch& epoch, const ThreadShare& s) const {
        const u64 own = static_cast<u64>(RANK) * p.vectors + s.at;
        const auto give = [&](int k, const weft::Numbers& total) {
            const uint4 result = total.rounded();
            epoch.send_to_all(results + s.index + k * threads, weft::ll_encode(result));
            store<WHOLE>(p, own + k * stride, result);
        };
        if constexpr (COUNT == 1) {
            give(0, weft::take_reduced<Reduce>(epoch, s.index, input_of<WHOLE>(p, own)));
        } else {
            uint4 in[COUNT * WORLD_SIZE];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) in[k * WORLD_SIZE + RANK] = input_of<WHOLE>(p, own + k * stride);
            epoch.take_all<COUNT>(s.index, in, threads);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                give(k, weft::reduced<Reduce>([&](int src) { return in[k * WORLD_SIZE + src]; }));
            }
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void collect(const Epoch& epoch, const ThreadShare& s) const {
        const auto give = [&](int k, int src, const uint4& v) {
            store<WHOLE>(p, static_cast<u64>(src) * p.vectors + s.at + k * stride, v);
        };
        if constexpr (COUNT == 1) {
            weft::store_all(epoch, results + s.index, [&](int src, const uint4& v) { give(0, src, v); });
        } else {
            uint4 in[COUNT * WORLD_SIZE];
            epoch.take_all<COUNT>(results + s.index, in, threads);
#pragma unroll
            for (int i = 0; i < COUNT * WORLD_SIZE; ++i) {
                if (i % WORLD_SIZE != RANK) give(i / WORLD_SIZE, i % WORLD_SIZE, in[i]);
            }
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void reduce_all(const Epoch& epoch, ThreadShare s, u32 end) const {
        for (; s.at + (COUNT - 1) * stride < end; skip(s, COUNT)) reduce<COUNT>(epoch, s);
        if constexpr (COUNT > 1) reduce_all<1>(epoch, s, end);
    }

    // With IN_TURN the other peers get what was sent to the first one.
    template <int COUNT>
    __device__ __forceinline__ void answer(const Epoch& epoch, const ThreadShare& first, u32 end, u32) const {
        reduce_all<COUNT>(epoch, first, end);
#if IN_TURN
        while (epoch.next_turn()) {
            for (ThreadShare s = first; s.at < end; skip(s)) {
                const uint4 result = load_from<WHOLE, true>(p, static_cast<u64>(RANK) * p.vectors + s.at);
                epoch.send_to_all(results + s.index, weft::ll_encode(result));
            }
        }
#endif
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32) const {
        for (; s.at + (COUNT - 1) * stride < end; skip(s, COUNT)) collect<COUNT>(epoch, s);
        if constexpr (COUNT > 1) receive<1>(epoch, s, end, threads);
    }
};

template <bool WHOLE>
__device__ __forceinline__ void two_shot_of(const Params& p) {
    weft::begin();
    TwoShot<WHOLE> steps(p, blockDim.x);
    const ThreadShare first;
    steps.load(first, p.vectors, blockDim.x);
    const Epoch epoch(p.slots);
    steps.send(epoch, first, p.vectors, blockDim.x);
#if IN_TURN
    while (epoch.next_turn()) steps.send(epoch, first, p.vectors, blockDim.x);
#endif
    steps.template answer<1>(epoch, first, p.vectors, blockDim.x);
    steps.template receive<1>(epoch, first, p.vectors, blockDim.x);
    epoch.leave();
}

template <bool WHOLE>
__device__ __forceinline__ void two_shot_rounds_of(const Params& p) {
    weft::begin();
    TwoShot<WHOLE> steps(p, blockDim.x - 32);
    weft::in_rounds<AT_ONCE>(p.slots, p.vectors, steps.results, steps);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) one_shot(const __grid_constant__ Params p) {
    one_shot_of<true>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) two_shot(const __grid_constant__ Params p) {
    two_shot_of<true>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) two_shot_rounds(const __grid_constant__ Params p) {
    two_shot_rounds_of<true>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) one_shot_any(const __grid_constant__ Params p) {
    one_shot_of<false>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) two_shot_any(const __grid_constant__ Params p) {
    two_shot_of<false>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) two_shot_rounds_any(const __grid_constant__ Params p) {
    two_shot_rounds_of<false>(p);
}
