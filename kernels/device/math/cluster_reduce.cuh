// A team of blocks, one cluster, that works on rows together: sums over the rows through distributed shared memory.
//
//   ClusterReduce<BLOCKS, TERMS, SUMS> team(count);   the cluster's blocks begin to gather
//   team.publish(i, terms);                  a term of each of the SUMS sums, told to every block
//   team.meet();                             all terms are there
//   team.totals(most, map, out);             map of each sum of terms 0 to most - 1: the same bits in every thread
//
// In each round every warp of every block publishes as often as the others, `count` times all in all, each i once.
// Terms are added in an order that depends on their numbers alone, neither on the cluster's size nor on who published them.
//
// Who writes: a lane of any block, a term into each block's shared memory, with its bytes for the barrier of the round
// there. Who waits: every thread, for all of a round's bytes at its own block's barrier. There is no fence in it: that of a
// cluster's barrier would wait for all that the multiprocessor has sent to peers.
//
// Why two sets of terms and two barriers are enough: who publishes for round n + 2 has met in round n + 1, for which every
// warp published, each after it had read the totals of round n. A block does not end before all that is written to its
// memory is there: it waits for it.

#pragma once

#include "ptx/barriers.cuh"
#include "math/warp.cuh"

namespace weft {

template <int BLOCKS, int TERMS, int SUMS = 1>
struct ClusterReduce {
    using Sums = WarpSums<SUMS>;
    static constexpr int ROUND = SUMS * TERMS;
    float* terms;
    u64* barriers;
    u32 bytes;  // of a round
    u32 round = 0;
    bool gathered = BLOCKS == 1;

    __device__ __forceinline__ explicit ClusterReduce(u32 count) : bytes(count * SUMS * sizeof(float)) {
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

    // By all threads, before the first publish: a block that has not started has no memory to write to.
    __device__ __forceinline__ void gather() {
        if constexpr (BLOCKS > 1) {
            if (!gathered) wait_for_cluster();
            gathered = true;
        }
    }

    // By whole warps.
    __device__ __forceinline__ void publish(int term, const float (&values)[SUMS]) {
        const float sum = Sums::of(values);
        if (Sums::which() >= SUMS) return;
        float* place = terms + round % 2 * ROUND + Sums::which() * TERMS + term;
        if constexpr (BLOCKS == 1) {
            if (Sums::lane() == 0) *place = sum;
        } else {
#pragma unroll
            for (int block = Sums::lane(); block < BLOCKS; block += Sums::LANES) {
                tell(place, barriers + round % 2, block, sum);
            }
        }
    }

    __device__ __forceinline__ void meet() {
        if constexpr (BLOCKS == 1) {
            __syncthreads();
        } else {
            wait(barriers + round % 2, round / 2 % 2);
            if (threadIdx.x == 0) arrive_expecting(barriers + round % 2, bytes);
        }
        ++round;
    }

    // By whole warps, behind the meeting of the round in which they were published.
    template <typename Map>
    __device__ __forceinline__ void totals(int most, const Map& map, float (&out)[SUMS]) const {
        const float* published = terms + (round - 1) % 2 * ROUND;
        float of_lane[SUMS] = {};
#pragma unroll
        for (int i = threadIdx.x % 32, first = 0; first < TERMS; first += 32, i += 32) {
            if (i >= most) break;
#pragma unroll
            for (int sum = 0; sum < SUMS; ++sum) of_lane[sum] += published[sum * TERMS + i];
        }
        Sums::to_all(map(Sums::of(of_lane)), out);
    }
};

}  // namespace weft
