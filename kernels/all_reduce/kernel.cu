// out = sum over ranks of x, every rank pushing into every rank: data that announces itself, no barrier.
//
// The wire. A slot is a 16-byte vector of 32-bit words in the receiver's memory. A word that is 0 is empty.
// The sender inverts each word of its payload, so empty would be the word 0xffffffff, a NaN in every dtype
// here; it is sent as the NaN 0xfffffffe instead. A sum turns every NaN into the same NaN, so any input
// survives bit for bit: NaN, -0.0, and the empty word itself. Nothing but payload is sent, and nothing is
// assumed of a store but that a 32-bit word of it arrives whole.
//
// Who writes: thread t of block b on rank r writes slot (half, r, t) of block b on every peer. Who waits:
// thread t of block b on each peer, until none of the words is empty; it then empties the slot again.
//
// Why no barrier. Every block b has its own slots, in two halves, and its own count of uses, EPOCH[b], which
// it advances when it leaves; use e takes half e & 1. All ranks launch the same grid for the same size and
// make their calls in the same order, one after the other, so use e of block b belongs to the same call on
// every rank, whatever calls without a block b lie between. Claim: when rank p sends for use e of block b,
// its slots on rank r are empty. They were used for e - 2. In its use e - 1, block b of p waited for what
// block b of r sent for e - 1: no block is launched without a vector. r sent that after its use e - 2 had
// ended, as kernels of one stream do, and that use emptied the slots. A block waits only for the blocks of
// its own number, which send before they wait: the grid need not be resident at once.
//
// Two forms that give the same bits, sums in float32 in rank order, rounded once:
//   one_shot  every rank sends its vectors to all, and sums what came.
//   two_shot  vector j of part q goes to rank q, which sums the ranks' and sends the sum to all: less on the
//             wire from three ranks on, one more trip. Every part has as many vectors, those past the end
//             hold zeros: so every block of every rank hears from every rank, as the claim needs.

#include "numbers.cuh"
#include "sync.cuh"

#ifndef WORLD_SIZE
#error "WORLD_SIZE: ranks of the group, 2 to 8"
#endif
#ifndef DTYPE
#error "DTYPE: float32, bfloat16 or float16"
#endif

namespace {

using weft::u32;
using weft::u64;
using Number = weft::DTYPE;
using Element = Number::Storage;

constexpr int WORDS = 4;  // of a vector
constexpr int ELEMENTS = WORDS * Number::PER_WORD;

struct Params {
    weft::Watch watch;
    u64 span;  // bytes from this rank's copy of an address to the next rank's
    const Element* x;
    Element* out;
    u64 numel;
    u32 vectors;  // one_shot: of the input; two_shot: of each part
    u32 capacity;  // slots of a block, for each half and sender
    u32 epochs;  // index of EPOCH[0] in words
    u32 slots;  // index of the first slot in words
    u32 average;  // divide the sums by the number of ranks
    u32 aligned;  // x and out lie at multiples of 16 bytes
};

struct Block {
    u32 epoch;
    u64 first;  // slot 0 of sender 0 in this use's half, in words

    __device__ explicit Block(const Params& p) {
        epoch = p.watch.words[p.epochs + blockIdx.x] + 1;
        const u64 halves = 2 * static_cast<u64>(blockIdx.x) + (epoch & 1);
        first = p.slots + halves * WORLD_SIZE * p.capacity * WORDS;
    }

    __device__ u64 slot(const Params& p, int sender, u32 index) const {
        return first + (static_cast<u64>(sender) * p.capacity + index) * WORDS;
    }

    __device__ uint4* place(const Params& p, int sender, u32 index) const {
        return reinterpret_cast<uint4*>(p.watch.words + slot(p, sender, index));
    }

    __device__ void leave(const Params& p) const {
        __syncthreads();  // every thread has read the epoch
        if (threadIdx.x == 0) p.watch.words[p.epochs + blockIdx.x] = epoch;
    }
};

// A thread's vectors: `at` in the input, `index` among the block's slots. Warps are dealt to the blocks in
// turn, so that a small input is sent by many multiprocessors.
struct Share {
    u32 at, index;

    __device__ Share() {
        at = ((threadIdx.x / 32) * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
        index = threadIdx.x;
    }

    __device__ void next() {
        at += gridDim.x * blockDim.x;
        index += blockDim.x;
    }
};

__device__ __forceinline__ u32& word(uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ bool has_empty(const uint4& v) {
    return v.x == 0 || v.y == 0 || v.z == 0 || v.w == 0;
}

__device__ __forceinline__ uint4 to_wire(const uint4& v) {
    return make_uint4(max(~v.x, 1u), max(~v.y, 1u), max(~v.z, 1u), max(~v.w, 1u));
}

__device__ __forceinline__ uint4 from_wire(const uint4& v) { return make_uint4(~v.x, ~v.y, ~v.z, ~v.w); }

// Vector `at` of the input; elements past its end are 0.
__device__ __forceinline__ uint4 load(const Params& p, u64 at) {
    const u64 start = at * ELEMENTS;
    if (p.aligned && start + ELEMENTS <= p.numel) return reinterpret_cast<const uint4*>(p.x)[at];
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (start + i < p.numel) {
            const u32 bits = p.x[start + i];
            word(v, i / Number::PER_WORD) |= bits << (16 * (i % Number::PER_WORD));
        }
    }
    return v;
}

__device__ __forceinline__ void store(const Params& p, u64 at, uint4 v) {
    const u64 start = at * ELEMENTS;
    if (p.aligned && start + ELEMENTS <= p.numel) {
        reinterpret_cast<uint4*>(p.out)[at] = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (start + i < p.numel) {
            const u32 bits = word(v, i / Number::PER_WORD) >> (16 * (i % Number::PER_WORD));
            p.out[start + i] = static_cast<Element>(bits);
        }
    }
}

__device__ __forceinline__ void send(const Params& p, int peer, u64 slot, const uint4& wire) {
    const long long away = static_cast<long long>(p.span) * (peer - p.watch.rank);
    char* there = reinterpret_cast<char*>(p.watch.words + slot) + away;
    weft::store_payload(reinterpret_cast<uint4*>(there), wire);
}

// The i-th peer to send to, i from 1 on: no two ranks send to the same one at the same time.
__device__ __forceinline__ int peer_of(const Params& p, int i) {
    const int peer = p.watch.rank + i;
    return peer < WORLD_SIZE ? peer : peer - WORLD_SIZE;
}

// Slot `index` of every peer as it comes, empty again behind it. in[rank] stays as it is.
__device__ __forceinline__ void receive(
    const Params& p, const Block& block, u32 index, uint4 (&in)[WORLD_SIZE]) {
    const int rank = p.watch.rank;
    weft::Patience patience;
    int missing;
#pragma unroll
    for (int src = 0; src < WORLD_SIZE; ++src) {
        if (src != rank) in[src] = make_uint4(0, 0, 0, 0);
    }
    do {
#pragma unroll
        for (int src = 0; src < WORLD_SIZE; ++src) {
            if (src != rank && has_empty(in[src])) {
                in[src] = weft::load_payload(block.place(p, src, index));
            }
        }
        missing = -1;
#pragma unroll
        for (int src = 0; src < WORLD_SIZE; ++src) {
            if (src != rank && has_empty(in[src])) missing = src;
        }
    } while (missing >= 0 && !patience.expired(p.watch, missing, block.slot(p, missing, index), block.epoch,
                                               block.epoch - 1, weft::WAIT_DATA));
#pragma unroll
    for (int src = 0; src < WORLD_SIZE; ++src) {
        if (src != rank) {
            // A later use's data cannot come before these zeros: see the claim above.
            *block.place(p, src, index) = make_uint4(0, 0, 0, 0);
            in[src] = from_wire(in[src]);
        }
    }
}

__device__ __forceinline__ uint4 sum(const Params& p, uint4 (&in)[WORLD_SIZE]) {
    uint4 result;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        float total[Number::PER_WORD];
        Number::unpack(word(in[0], i), total);
#pragma unroll
        for (int src = 1; src < WORLD_SIZE; ++src) {
            float part[Number::PER_WORD];
            Number::unpack(word(in[src], i), part);
#pragma unroll
            for (int k = 0; k < Number::PER_WORD; ++k) total[k] += part[k];
        }
        if (p.average) {
#pragma unroll
            for (int k = 0; k < Number::PER_WORD; ++k) total[k] /= WORLD_SIZE;
        }
        word(result, i) = Number::pack(total);
    }
    return result;
}

// in[rank] by a runtime rank, without an array in local memory.
__device__ __forceinline__ void put(uint4 (&in)[WORLD_SIZE], int rank, const uint4& v) {
#pragma unroll
    for (int src = 0; src < WORLD_SIZE; ++src) {
        if (src == rank) in[src] = v;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512) one_shot(const __grid_constant__ Params p) {
    const int rank = p.watch.rank;
    const Block block(p);

    for (Share s; s.at < p.vectors; s.next()) {
        const uint4 wire = to_wire(load(p, s.at));
#pragma unroll
        for (int i = 1; i < WORLD_SIZE; ++i) send(p, peer_of(p, i), block.slot(p, rank, s.index), wire);
    }

    for (Share s; s.at < p.vectors; s.next()) {
        uint4 in[WORLD_SIZE];
        put(in, rank, load(p, s.at));
        receive(p, block, s.index, in);
        store(p, s.at, sum(p, in));
    }
    block.leave(p);
}

extern "C" __global__ void __launch_bounds__(512) two_shot(const __grid_constant__ Params p) {
    const int rank = p.watch.rank;
    const Block block(p);
    const u32 sums = p.capacity / 2;  // the second half of a sender's slots is for sums

    for (Share s; s.at < p.vectors; s.next()) {
#pragma unroll
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const int peer = peer_of(p, i);
            const uint4 wire = to_wire(load(p, static_cast<u64>(peer) * p.vectors + s.at));
            send(p, peer, block.slot(p, rank, s.index), wire);
        }
    }

    for (Share s; s.at < p.vectors; s.next()) {
        const u64 own = static_cast<u64>(rank) * p.vectors + s.at;
        uint4 in[WORLD_SIZE];
        put(in, rank, load(p, own));
        receive(p, block, s.index, in);
        const uint4 result = sum(p, in);
        const uint4 wire = to_wire(result);
#pragma unroll
        for (int i = 1; i < WORLD_SIZE; ++i) {
            send(p, peer_of(p, i), block.slot(p, rank, sums + s.index), wire);
        }
        store(p, own, result);
    }

    for (Share s; s.at < p.vectors; s.next()) {
        uint4 in[WORLD_SIZE];
        receive(p, block, sums + s.index, in);
#pragma unroll
        for (int src = 0; src < WORLD_SIZE; ++src) {
            if (src != rank) store(p, static_cast<u64>(src) * p.vectors + s.at, in[src]);
        }
    }
    block.leave(p);
}
