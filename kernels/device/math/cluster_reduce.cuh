// Sums over rows by a cluster of blocks, through distributed shared memory.
//
//   ClusterReduce<BLOCKS, TERMS, SUMS> team(count);   arms the barriers
//   team.publish(i, terms);                  term i of each of the SUMS sums, to every block
//   team.join();                             all terms of the round are there
//   team.totals(most, map, out);             map of each sum of terms 0 to most - 1: the same bits in every thread
//
// In a round of its own, the largest of terms that are not negative; one that is a NaN is larger than all others:
//
//   team.publish_largest(i, terms);
//   team.join();
//   team.largest(most, map, out);
//
// In each round every warp of every block publishes as often as the others, `count` times in all, each i once. Terms
// are added in the order of i, whatever the cluster's size.
//
// Who writes: a lane of any block, a term into each block's shared memory, counted at the round's mbarrier there. Who
// waits: every thread, for all bytes of a round at its own block's mbarrier. No fence and no cluster barrier: their
// release would wait for all that the SM has sent to peers. docs/protocol.md#cluster-reduction has the proof.

#pragma once

#include "ptx/barriers.cuh"
#include "math/warp.cuh"

namespace weft {

// PARTS: terms of a chunk are made of so many numbers, for what is more than a sum (cluster_moments.cuh).
template <int BLOCKS, int TERMS, int SUMS = 1, int PARTS = 1>
struct ClusterReduce {
    using Sums = WarpSums<SUMS>;
    static constexpr int ROUND = PARTS * SUMS * TERMS;
    float* terms;
    u64* barriers;
    u32 bytes;  // of a round
    u32 round = 0;
    bool gathered = BLOCKS == 1;

    __device__ __forceinline__ explicit ClusterReduce(u32 count) : bytes(count * PARTS * SUMS * sizeof(float)) {
        terms = of_block<float[2 * ROUND]>();
        if constexpr (BLOCKS > 1) {
            barriers = of_block<u64[2]>();
            if (threadIdx.x == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) init_barrier(barriers + i, 1);
                publish_barriers();
#pragma unroll
                for (int i = 0; i < 2; ++i) arrive_expecting(barriers + i, bytes);
            }
            __syncwarp();
            arrive_at_cluster();
        }
    }

    __device__ __forceinline__ static int rank() {
        if constexpr (BLOCKS == 1) return 0;
        return rank_in_cluster();
    }

    // By all threads, before the first publish: a block that has not started has no shared memory to write to.
    __device__ __forceinline__ void gather() {
        if constexpr (BLOCKS > 1) {
            if (!gathered) wait_for_cluster();
            gathered = true;
        }
    }

    // By whole warps.
    __device__ __forceinline__ void publish(int term, const float (&values)[SUMS]) {
        share(0, term, Sums::of(values));
    }

    // By whole warps.
    __device__ __forceinline__ void publish_largest(int term, const float (&values)[SUMS]) {
        u32 mine = 0;
#pragma unroll
        for (int sum = 0; sum < SUMS; ++sum) {
            const u32 largest = largest_of_warp(__float_as_uint(values[sum]));
            if (Sums::which() == sum) mine = largest;
        }
        share(0, term, __uint_as_float(mine));
    }

    __device__ __forceinline__ void join() {
        if constexpr (BLOCKS == 1) {
            __syncthreads();
        } else {
            wait(barriers + round % 2, round / 2 % 2);
            if (threadIdx.x == 0) arrive_expecting(barriers + round % 2, bytes);
        }
        ++round;
    }

    // By whole warps, after `join` of the round in which the terms were published.
    template <typename Map>
    __device__ __forceinline__ void totals(int most, const Map& map, float (&out)[SUMS]) const {
        float of_lane[SUMS] = {};
        each_published(most, [&](int, const float* term) {
#pragma unroll
            for (int sum = 0; sum < SUMS; ++sum) of_lane[sum] += term[sum * TERMS];
        });
        Sums::to_all(map(Sums::of(of_lane)), out);
    }

    // By whole warps, after `join` of the round in which the largest were published.
    template <typename Map>
    __device__ __forceinline__ void largest(int most, const Map& map, float (&out)[SUMS]) const {
        u32 of_lane[SUMS] = {};
        each_published(most, [&](int, const float* term) {
#pragma unroll
            for (int sum = 0; sum < SUMS; ++sum) of_lane[sum] = max(of_lane[sum], __float_as_uint(term[sum * TERMS]));
        });
#pragma unroll
        for (int sum = 0; sum < SUMS; ++sum) out[sum] = map(__uint_as_float(largest_of_warp(of_lane[sum])));
    }

protected:
    // By whole warps: a part of each sum's term, where WarpSums leaves it.
    __device__ __forceinline__ void share(int part, int term, float value) {
        if (Sums::which() >= SUMS) return;
        float* place = terms + round % 2 * ROUND + (part * SUMS + Sums::which()) * TERMS + term;
        if constexpr (BLOCKS == 1) {
            if (Sums::lane() == 0) *place = value;
        } else {
#pragma unroll
            for (int block = Sums::lane(); block < BLOCKS; block += Sums::LANES) {
                tell(place, barriers + round % 2, block, value);
            }
        }
    }

    // The first term of the first sum, after `join`.
    __device__ __forceinline__ const float* published() const { return terms + (round - 1) % 2 * ROUND; }

    // The terms that are this lane's to add: `what` takes the index, and where the first part of the first sum's lies.
    template <typename What>
    __device__ __forceinline__ void each_published(int most, const What& what) const {
        const float* published = this->published();
#pragma unroll
        for (int i = threadIdx.x % 32, first = 0; first < TERMS; first += 32, i += 32) {
            if (i >= most) break;
            what(i, published + i);
        }
    }
};

}  // namespace weft
