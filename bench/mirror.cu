// What a rank that runs alone (alone_scatter.py) gets from peers that do as it does: what it has stored at a peer comes to
// lie in its own half as well, where a peer would have stored the like. Rank 0's part for rank e stands, in the same step,
// for that of rank W - e for rank 0: order.cuh lets each rank go through its peers from the next one on.
//
// Each warp follows two of the rank's warps that send, burst by burst, as they send. Bursts come no faster than links bring
// what all peers together send: they draw their time from a clock as a sender's do (pace.cuh). What this kernel itself takes from
// one store to the other, the trip of a poll, that of loads and that of stores, is about as long as a link: nothing is added.
// (Vectors are not emptied where they came from: a peer would do that in memory of its own GPU. The host does, later.)

#include "../matmul_reduce_scatter/order.cuh"
#include "pace.cuh"
#include "wire.cuh"

using weft::u32;

struct Params {
    weft::Watch watch;  // `words` are a peer's: the clock there is nobody else's
    weft::Half half;
    uint4* inbox;  // the own half
    int batches, m, n, band;  // as the op has them
    int clusters;  // of the op
    u32 rate;  // bytes a nanosecond
};

namespace {

using Order = weft::ScatterOrder<Params>;

constexpr int FOLLOWED = 2;  // warps, by one of these: as many of these as there are registers for on the multiprocessors
constexpr int AHEAD = 8;  // vectors of a lane, on their way at once
constexpr u32 BURST = 32 * AHEAD, PART = BM * BN / 16;  // vectors
static_assert(PART % BURST == 0);

// By a warp that is together. It comes to its end before its time if what it waits for does not come: the rank will miss
// that, and say so.
struct Follower {
    int warp;  // of those that send: cluster, block and part
    int step;  // of the cluster's, the next one to be looked at
    u32 left = 0;  // bursts of the part
    const uint4* from;  // this lane's first vector of the next one
    u32 to;  // where it goes: of vectors from the begin of the own half

    __device__ __forceinline__ Follower(const Params& p, int warp) : warp(warp) {
        step = warp / 4 < p.clusters ? warp / 4 : Order(p).steps();
        find(p);
    }

    // The next part that is sent.
    __device__ __forceinline__ void find(const Params& p) {
        const Order order(p);
        for (; left == 0 && step < order.steps(); step += p.clusters) {
            const weft::ScatterTile t = order.tile(p, step, warp / 2 % 2);
            if (!t.inside || t.dst == p.watch.rank) continue;
            const u32 slot = 2 * order.each() * PART, place = (2 * t.index + warp % 2) * PART + threadIdx.x % 32;
            from = weft::on_rank(p.inbox, p.watch, p.half, t.dst) + place;
            to = (WORLD_SIZE - 1 - t.dst) * slot + place;
            left = PART / BURST;
        }
    }

    // A word of the burst's last vector, for all lanes: if it has come, the others have or are about to. All of these warps
    // at once may wait, and whole bursts would take more than their multiprocessors load.
    __device__ __forceinline__ u32 hint() const {
        if (left == 0) return 0;
        return weft::load_relaxed(&(from + BURST - 1 - threadIdx.x % 32)->w);
    }

    // Whether all of the burst has come, which then is with the rank.
    __device__ __forceinline__ bool forward(const Params& p, weft::SharedPace& pace, weft::Patience& patience) {
        pace.ask(1);
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) v[i] = weft::load_payload(from + 32 * i);
        for (;;) {
            bool missing = false;
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) missing |= weft::has_empty(v[i]);
            if (!__any_sync(~0u, missing)) break;
            if (is_late(p, patience)) return false;
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) weft::reload_payload(weft::has_empty(v[i]), from + 32 * i, v[i]);
        }
        pace.wait();
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) weft::store_payload(p.inbox + to + 32 * i, v[i]);
        from += BURST;
        to += BURST;
        if (--left == 0) find(p);
        return true;
    }

    __device__ __forceinline__ static bool is_late(const Params& p, weft::Patience& patience) {
        return patience.due() && __any_sync(~0u, patience.is_late(p.watch));
    }
};

}  // namespace

// In clusters as the op is: where single blocks lie, pairs of multiprocessors may be short of one that the op needs.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(1024, 1)
    mirror(const __grid_constant__ Params p) {
    const int warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32;
    Follower first(p, warp), second(p, warp + gridDim.x * warps);
    static_assert(FOLLOWED == 2);
    weft::SharedPace pace(p.watch, p.half, BURST * sizeof(uint4), p.rate);
    weft::Patience patience;
    while ((first.left | second.left) != 0) {
        // Lanes may have seen different words: one of them decides.
        const u32 hints[FOLLOWED] = {first.hint(), second.hint()};
        const bool of_first = __shfl_sync(~0u, hints[0], 0) != 0, of_second = __shfl_sync(~0u, hints[1], 0) != 0;
        if (of_first && !first.forward(p, pace, patience)) return;
        if (of_second && !second.forward(p, pace, patience)) return;
        if (!of_first && !of_second && Follower::is_late(p, patience)) return;
    }
}
