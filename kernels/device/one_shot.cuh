// What kernels share that exchange parts of a matrix between all ranks in one shot, beside products of cuBLAS.
//
// All ranks launch the same grid. Block b has the b-th range of every part. It stores its range of what is for a peer into
// the peer's half, sets flags(half)[rank][b] = e there, waits for flag b of every peer, and reads what they have stored in
// its own half. Before the first store, done(half)[p] >= e - 1 was seen of every peer p. Use e = EPOCH[half] + 1 is read
// when the kernel starts; its last block ends the use (weft::leave).
//
// A block waits only for the blocks of its own number, which send before they wait: the grid need not be resident at once,
// as long as blocks start in the order of their numbers, as they do.
//
// A rank that has given up sends nothing and sets no flag; what it computes is worth nothing, and it ends the use.

#pragma once

#include "half.cuh"

#ifndef WORLD_SIZE
#error "WORLD_SIZE: ranks of the group, 2 or more"
#endif

namespace weft {

constexpr int THREADS = 512;
constexpr int AHEAD = 8;  // vectors of 16 bytes of a thread, on their way at once
constexpr int PEERS = WORLD_SIZE - 1;
constexpr bool FEW = WORLD_SIZE <= 8;  // a vector of each rank fits into a thread's registers

// A block's vectors of a part that has `count`: whole lines of 128 bytes.
struct Range {
    u32 first, last;

    __device__ __forceinline__ explicit Range(u32 count) {
        const u32 lines = (count + 7) / 8, each = (lines + gridDim.x - 1) / gridDim.x * 8;
        first = min(blockIdx.x * each, count);
        last = min(first + each, count);
    }
};

// The i-th peer, i from 0 on: no two ranks send to the same one at the same time.
__device__ __forceinline__ int peer_of(const Watch& watch, int i) {
    return watch.rank > i ? watch.rank - i - 1 : watch.rank - i - 1 + WORLD_SIZE;
}

// Whether this block sends: by all threads, of which each gets the same answer. They may see different things around a
// deadline, so the first warp looks for all.
__device__ __forceinline__ bool block_may_send(const Watch& watch, const Half& half, u32 use) {
    return __syncthreads_and(threadIdx.x >= 32 || may_send(watch, half, use));
}

// By all threads, behind the block's last store to a peer.
__device__ __forceinline__ void announce(const Watch& watch, const Half& half, u32 use, bool sends) {
    __syncthreads();
    if (threadIdx.x == 0 && sends) {
        u32* flag = watch.words + half.flags + watch.rank * half.flags_per_rank + blockIdx.x;
        __threadfence_system();
        for (int i = 0; i < PEERS; ++i) {
            post_behind_fence(on_rank(flag, watch, half, peer_of(watch, i)), use);
        }
    }
    __syncwarp();
}

// Until what this block's peers send lies in the own half: by all threads, of which one waits for each peer.
__device__ __forceinline__ void await(const Watch& watch, const Half& half, u32 use) {
    const int peer = threadIdx.x;
    if (peer < WORLD_SIZE && peer != watch.rank) {
        wait_flag(watch, peer, half.flags + peer * half.flags_per_rank + blockIdx.x, use, WAIT_DATA);
    }
    __syncthreads();
}

// This thread's vectors of a block's range of LISTS lists: `store(list, at, load(list, at))`, many loads at once, and
// `between` once, behind the first of them.
template <int LISTS, typename Load, typename Between, typename Store>
__device__ __forceinline__ void move(
    const Range& range, const Load& load, const Between& between, const Store& store) {
    constexpr int BESIDE = FEW ? LISTS : 1, EACH = AHEAD / BESIDE;
    const u32 start = range.first + threadIdx.x;
    u32 at = start;
    int list = 0;
    uint4 v[EACH][BESIDE];
    const auto load_some = [&] {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int j = 0; j < BESIDE; ++j) {
                if (at + i * THREADS < range.last) v[i][j] = load(list + j, at + i * THREADS);
            }
        }
    };
    load_some();
    between();
    for (;;) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int j = 0; j < BESIDE; ++j) {
                if (at + i * THREADS < range.last) store(list + j, at + i * THREADS, v[i][j]);
            }
        }
        at += EACH * THREADS;
        if (at >= range.last) {
            at = start;
            list += BESIDE;
            if (list >= LISTS) break;
        }
        load_some();
    }
}

}  // namespace weft
