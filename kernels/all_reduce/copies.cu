// The kernels between the copies of an all-reduce by copy engines: copy_engine.py has the whole sequence.
//
//   reduce_chunk  one chunk of this rank's part, from x and from the slots that the peers' engines filled,
//                 to out; the engines then copy it to the peers.
//   collect       the peers' parts from the slots of results to out, as they come; ends the use of the half.
//
// Who writes a flag: rank p's engine, a copy of its TICKET word behind the data on the same stream. Who waits:
// thread p of each block of reduce_chunk, thread 0 of each block of collect. Sums are those of kernel.cu: in
// float32, in rank order.

#include "farewell.cuh"
#include "push.cuh"

#ifndef REDUCE
#error "REDUCE: sum, avg, max or min"
#endif

namespace {

using weft::ELEMENTS;
using weft::u32;
using weft::u64;
using Number = weft::Number;
using Element = Number::Storage;
using Reduce = weft::reduce::REDUCE;

struct Params {
    weft::Watch watch;
    u64 span;  // bytes from this rank's copy of an address to the next rank's
    const Element* x;
    Element* out;
    const Element* slots;  // of this half: [WORLD_SIZE][part] that came in, [WORLD_SIZE][part] of results
    u64 numel;
    u64 part;  // elements of every part but the last ones, a multiple of ELEMENTS
    u64 chunk;  // elements of a part that are copied at once, likewise
    u32 chunks;
    u32 which;  // reduce_chunk: which of them
    u32 flags;  // index of flag 0 of rank 0: `chunks` for what came in, `chunks` for results
    u32 flags_per_rank;
    u32 ticket, epoch, left, done;  // indices of the half's words
};

struct Range {
    u64 first, count;  // elements

    __device__ __forceinline__ Range(const Params& p, u64 owner, u64 which) {
        const u64 from = which * p.chunk;
        const u64 to = from + p.chunk < p.part ? from + p.chunk : p.part;
        first = owner * p.part + from;
        const u64 end = owner * p.part + to < p.numel ? owner * p.part + to : p.numel;
        count = first < end && from < to ? end - first : 0;
    }
};

__device__ __forceinline__ uint4 load(const Element* place, u64 count) {
    if (count >= ELEMENTS) return weft::load_vector(reinterpret_cast<const uint4*>(place));
    uint4 v = make_uint4(0, 0, 0, 0);
    for (int i = 0; i < ELEMENTS; ++i) {
        if (i < count) {
            weft::word(v, i / Number::PER_WORD) |= static_cast<u32>(place[i]) << (16 * (i % Number::PER_WORD));
        }
    }
    return v;
}

__device__ __forceinline__ void store(Element* place, uint4 v, u64 count) {
    if (count >= ELEMENTS) {
        weft::store_vector(reinterpret_cast<uint4*>(place), v);
        return;
    }
    for (int i = 0; i < ELEMENTS; ++i) {
        if (i < count) {
            place[i] = static_cast<Element>(weft::word(v, i / Number::PER_WORD) >> (16 * (i % Number::PER_WORD)));
        }
    }
}

__device__ __forceinline__ bool wait(const Params& p, u32 expected, int peer, u32 flag) {
    const u32 word = p.flags + peer * p.flags_per_rank + flag;
    return weft::wait_flag(p.watch, peer, word, expected, weft::WAIT_DATA);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) reduce_chunk(const __grid_constant__ Params p) {
    const u32 use = p.watch.words[p.ticket];
    for (int peer = threadIdx.x; peer < WORLD_SIZE; peer += blockDim.x) {
        // The flags that are copied behind the result then announce nothing, and the peers miss it.
        if (peer != RANK && !wait(p, use, peer, p.which)) p.watch.words[p.ticket] = use - 1;
    }
    __syncthreads();

    const Range range(p, RANK, p.which);
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x * ELEMENTS;
    for (u64 i = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * ELEMENTS; i < range.count; i += step) {
        const u64 rest = range.count - i;
        const Element* came = p.slots + p.which * p.chunk + i;
        uint4 in[weft::FEW ? WORLD_SIZE : 1];
        if constexpr (weft::FEW) {
#pragma unroll
            for (int src = 0; src < WORLD_SIZE; ++src) {
                in[src] = load(src == RANK ? p.x + range.first + i : came + src * p.part, rest);
            }
        }
        const weft::Numbers total = weft::reduced<Reduce>([&](int src) {
            if constexpr (weft::FEW) return in[src];
            return load(src == RANK ? p.x + range.first + i : came + src * p.part, rest);
        });
        store(p.out + range.first + i, total.rounded(), rest);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) collect(const __grid_constant__ Params p) {
    const u32 use = p.watch.words[p.ticket];
    const Element* results = p.slots + WORLD_SIZE * p.part;
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x * ELEMENTS;
    for (u32 which = 0; which < p.chunks; ++which) {
        // Rank - 1 serves this rank first, then rank - 2.
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const int src = (RANK + WORLD_SIZE - i) % WORLD_SIZE;
            if (threadIdx.x == 0) wait(p, use, src, p.chunks + which);
            __syncthreads();
            const Range range(p, src, which);
            u64 at = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * ELEMENTS;
            for (; at + 3 * step + ELEMENTS <= range.count; at += 4 * step) {
                uint4 v[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    v[k] = weft::load_vector(reinterpret_cast<const uint4*>(results + range.first + at + k * step));
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    weft::store_vector(reinterpret_cast<uint4*>(p.out + range.first + at + k * step), v[k]);
                }
            }
            for (; at < range.count; at += step) {
                const u64 rest = range.count - at;
                store(p.out + range.first + at, load(results + range.first + at, rest), rest);
            }
        }
    }

    // The last block to leave says that nothing of this half is read any more.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(p.watch.words + p.left, 1u) == gridDim.x - 1) {
            __threadfence();
            for (int i = 0; i < WORLD_SIZE; ++i) weft::hear_farewell(p.watch, i, p.done, use);
            p.watch.words[p.left] = 0;
            p.watch.words[p.epoch] = use;
            for (int i = 0; i < WORLD_SIZE; ++i) {
                char* words = reinterpret_cast<char*>(p.watch.words) + static_cast<long long>(p.span) * (i - RANK);
                weft::post_flag(reinterpret_cast<u32*>(words) + p.done + RANK, use);
            }
        }
    }
}
